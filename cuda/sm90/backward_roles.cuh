#pragma once

#include "sm90/backward.h"
#include "sm90/backward_load.cuh"
#include "sm90/backward_multiplier.cuh"
#include "sm90/backward_schedule.cuh"
#include "sm90/persistent.cuh"
#include "sm90/pull.cuh"

// Who does what in the backward kernel.
namespace mok::sm90 {

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
      pull_tokens(
          params,
          takes_x
              ? Pull{params.x_offset, params.received_x, params.x_pulled, params.x_is_pushed}
              : Pull{params.dy_offset, params.received_dy, params.dy_pulled, params.dy_is_pushed},
          warp, warps);
    }
  }
};

}  // namespace mok::sm90
