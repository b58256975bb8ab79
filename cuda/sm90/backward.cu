#include "sm90/backward_roles.cuh"

namespace mok::sm90 {

cudaError_t prepare_backward(int* clusters) {
  return prepare<BackwardRoles<BackwardParams>, BackwardRoles<RecordedBackwardParams>>(clusters);
}

cudaError_t launch_backward(const BackwardParams& params, const Timeline& timeline, int clusters,
                            cudaStream_t stream) {
  return timeline.entries == nullptr
             ? launch<BackwardRoles<BackwardParams>>(params, clusters, stream)
             : launch<BackwardRoles<RecordedBackwardParams>>({params, timeline}, clusters, stream);
}

}  // namespace mok::sm90
