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

  // The output's gradients first, since only the weights' gradients need tokens; but a replay needs
  // them before anything else.
  __device__ static void pull(const Params& params, int warp, int warps) {
    if (*params.skip != 0) {
      return;
    }
    const bool replays = params.waves[0].replays != 0;
#pragma unroll 1  // two copies of what follows would take the multiplying warps' registers
    for (int turn = 0; turn < 2; ++turn) {
      const bool takes_x = (turn == 0) == replays;
      pull_tokens(params,
                  takes_x ? Pull{params.x_offset, params.received_x, params.x_pulled}
                          : Pull{params.dy_offset, params.received_dy, params.dy_pulled},
                  warp, warps);
    }
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
