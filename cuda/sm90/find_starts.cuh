#pragma once

#include "device/warp.cuh"
#include "sm90/unit_table.h"

namespace mok::sm90 {

__device__ inline int32_t of_last_lane(int32_t value) {
  return __shfl_sync(kAllLanes, value, kWarp - 1);
}

// What lies before each expert and, behind the last, before the end; computed by one warp from
// expert_tile, int32 [experts + 1].
__device__ inline void find_starts(const WorkShape& shape, int32_t experts,
                                   const int32_t* expert_tile, Start* starts) {
  const int lane = threadIdx.x % kWarp;
  Units total{};
  for (int32_t begin = 0; begin < experts; begin += kWarp) {
    const int32_t expert = begin + lane;
    const bool present = expert < experts;
    const int32_t tile = present ? expert_tile[expert] : 0;
    const Units own = present ? units_of(shape, expert_tile[expert + 1] - tile) : Units{};
    const Units upto{inclusive_scan(own.full), inclusive_scan(own.pair),
                     inclusive_scan(own.single)};
    if (present) {
      starts[expert] = {total + upto - own, tile};
    }
    total =
        total + Units{of_last_lane(upto.full), of_last_lane(upto.pair), of_last_lane(upto.single)};
  }
  if (lane == 0) {
    starts[experts] = {total, expert_tile[experts]};
  }
}

}  // namespace mok::sm90
