#pragma once

#include <cstdint>

namespace mok {

// The device's clock, by which all of its blocks see the same time.
__device__ inline uint64_t global_nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace mok
