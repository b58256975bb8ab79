#pragma once

#include "sm90/forward.h"
#include "sm90/forward_load.cuh"
#include "sm90/forward_multiplier.cuh"
#include "sm90/forward_schedule.cuh"
#include "sm90/persistent.cuh"
#include "sm90/pull.cuh"

// Who does what in the forward kernel.
namespace mok::sm90 {

template <typename AnyParams>
struct ForwardRoles {
  using Params = AnyParams;
  using Scheduler = ForwardScheduler<Params>;
  using Loader = ForwardLoader;
  using Multiplier = ForwardMultiplier<Params>;

  __device__ static void pull(const Params& params, int warp, int warps) {
    pull_tokens(params, {params.x_offset, params.received, params.pulled, params.x_is_pushed}, warp,
                warps);
  }
};

}  // namespace mok::sm90
