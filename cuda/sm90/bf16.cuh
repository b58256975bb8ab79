#pragma once

#include <cstdint>

// Two bf16 in a word, the first one in the lower half.
namespace mok::sm90 {

// Rounded to nearest even.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ inline float low_bf16(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ inline float high_bf16(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }

}  // namespace mok::sm90
