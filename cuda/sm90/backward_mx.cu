#include "sm90/backward_roles.cuh"

namespace mok::sm90 {

cudaError_t prepare_mx_backward(int* clusters) {
  return prepare<BackwardRoles<MxBackwardParams>, BackwardRoles<RecordedMxBackwardParams>>(
      clusters);
}

cudaError_t launch_mx_backward(const BackwardParams& params, const Timeline& timeline, int clusters,
                               cudaStream_t stream) {
  return timeline.entries == nullptr
             ? launch<BackwardRoles<MxBackwardParams>>({params}, clusters, stream)
             : launch<BackwardRoles<RecordedMxBackwardParams>>({{params, timeline}}, clusters,
                                                               stream);
}

}  // namespace mok::sm90
