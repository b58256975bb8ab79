#pragma once

#include <cstdint>

namespace mok {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = ~0u;

// Sum of the values of a warp's lanes up to and with the own one.
__device__ inline int32_t inclusive_scan(int32_t value) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, value, offset);
    value += lane >= offset ? other : 0;
  }
  return value;
}

}  // namespace mok
