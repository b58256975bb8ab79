#include "sm90/forward.h"
#include "sm90/forward_load.cuh"
#include "sm90/forward_multiplier.cuh"
#include "sm90/forward_schedule.cuh"
#include "sm90/persistent.cuh"
#include "sm90/pull.cuh"

namespace mok::sm90 {
namespace {

template <typename AnyParams>
struct ForwardRoles {
  using Params = AnyParams;
  using Scheduler = ForwardScheduler<Params>;
  using Loader = ForwardLoader;
  using Multiplier = ForwardMultiplier<Params>;

  __device__ static void pull(const Params& params, int warp, int warps) {
    pull_tokens(params, {params.x_offset, params.received, params.pulled}, warp, warps);
  }
};

}  // namespace

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
