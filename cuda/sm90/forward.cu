#include "sm90/forward_roles.cuh"

namespace mok::sm90 {

cudaError_t prepare_forward(int* clusters) {
  return prepare<ForwardRoles<ForwardParams>, ForwardRoles<RecordedForwardParams>>(clusters);
}

cudaError_t launch_forward(const ForwardParams& params, const Timeline& timeline, int clusters,
                           cudaStream_t stream) {
  return timeline.entries == nullptr
             ? launch<ForwardRoles<ForwardParams>>(params, clusters, stream)
             : launch<ForwardRoles<RecordedForwardParams>>({params, timeline}, clusters, stream);
}

}  // namespace mok::sm90
