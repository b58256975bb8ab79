#include "sm90/forward_roles.cuh"

namespace mok::sm90 {

cudaError_t prepare_mx_forward(int* clusters) {
  return prepare<ForwardRoles<MxForwardParams>, ForwardRoles<RecordedMxForwardParams>>(clusters);
}

cudaError_t launch_mx_forward(const ForwardParams& params, const Timeline& timeline, int clusters,
                              cudaStream_t stream) {
  return timeline.entries == nullptr
             ? launch<ForwardRoles<MxForwardParams>>({params}, clusters, stream)
             : launch<ForwardRoles<RecordedMxForwardParams>>({{params, timeline}}, clusters,
                                                             stream);
}

}  // namespace mok::sm90
