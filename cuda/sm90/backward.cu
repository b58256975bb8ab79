#include "sm90/backward.h"
#include "sm90/backward_load.cuh"
#include "sm90/backward_multiplier.cuh"
#include "sm90/backward_schedule.cuh"
#include "sm90/persistent.cuh"
#include "sm90/pull.cuh"

namespace mok::sm90 {
namespace {

template <typename AnyParams>
struct BackwardRoles {
  using Params = AnyParams;
  using Scheduler = BackwardScheduler<Params>;
  using Loader = BackwardLoader;
  using Multiplier = BackwardMultiplier<Params>;

  // The output's gradient first: it is needed first.
  __device__ static void pull(const Params& params, int warp, int warps) {
    if (*params.skip != 0) {
      return;
    }
    pull_tokens(params, warp, warps, [&](const char* base, int64_t from, int64_t to) {
      if (params.pulls_dy) {
        copy_row(reinterpret_cast<const Bits16*>(base + params.dy_offset) + from,
                 params.received_dy + to, params.hidden);
      }
      if (params.pulls_x) {
        copy_row(reinterpret_cast<const Bits16*>(base + params.x_offset) + from,
                 params.received_x + to, params.hidden);
      }
    });
  }
};

}  // namespace

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
