#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/bf16.cuh"
#include "sm90/forward.h"
#include "sm90/fragment.h"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"

// From accumulators to bf16 rows. A thread of a warpgroup's accumulator holds, for every eight
// columns, two neighbouring values of a row and two of the row eight below.
namespace mok::sm90 {

constexpr int kPanelAccumulators = kTileRows * kPanelColumns / kWarpgroup;

__device__ inline float sigmoid_of(float gate) {
  float power, quotient;
  constexpr float kMinusLog2E = -1.4426950408889634f;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(gate, kMinusLog2E)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(__fadd_rn(1.0f, power)));
  return quotient;
}

__device__ inline float silu(float gate) { return __fmul_rn(gate, sigmoid_of(gate)); }

// Rounding to bf16 may not cross the clamp: whether the gradient is cut off is decided alike before
// and after it. So values move to the bf16 neighbour of the clamp on their side, if beyond it.
__device__ inline float keep_side_of_clamp(float value, const Clamp& clamp) {
  return value < clamp.limit ? fminf(value, clamp.below)
                             : (value < clamp.not_below ? clamp.not_below : value);
}

// For accumulators in panels of gate and up by turns.
template <int kCount>
__device__ void keep_sides_of_clamp(float (&accumulators)[kCount], const Clamp& clamp) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool is_gate = i / kPanelAccumulators % 2 == 0;
    float& value = accumulators[i];
    value = is_gate ? keep_side_of_clamp(value, clamp)
                    : copysignf(keep_side_of_clamp(fabsf(value), clamp), value);
  }
}

template <bool kClamps>
__device__ float swiglu(float gate, float up, float limit) {
  if constexpr (kClamps) {  // written so that a NaN stays one
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
  }
  return __fmul_rn(silu(gate), up);
}

template <bool kClamps>
__device__ uint32_t swiglu_pair(uint32_t gates, uint32_t ups, float limit) {
  return pack_bf16(swiglu<kClamps>(low_bf16(gates), low_bf16(ups), limit),
                   swiglu<kClamps>(high_bf16(gates), high_bf16(ups), limit));
}

// The i-th word of a group of a panel's accumulators.
__device__ inline uint32_t pack_pair(const float* panel, int group, int i) {
  const float* const pair = panel + (group * kGroupWords + i) * 2;
  return pack_bf16(pair[0], pair[1]);
}

__device__ inline uint4 pack_group(const float* panel, int group) {
  return {pack_pair(panel, group, 0), pack_pair(panel, group, 1), pack_pair(panel, group, 2),
          pack_pair(panel, group, 3)};
}

// Writes a group of a panel to a warp's staging buffer, rows of 128 bytes in the 128-byte swizzle.
template <typename Word>
__device__ void stage_group(Element* buffer, int group, const Word& word) {
  const int lane = threadIdx.x % kWarp;
  const int row = lane % kWarpRows;
  const int eighth = (group * 2 + lane / kWarpRows) ^ (row % 8);
  auto* const address =
      reinterpret_cast<cute::uint128_t*>(buffer + row * kPanelColumns + eighth * 8);
  cute::SM90_U32x4_STSM_N::copy(word(0), word(1), word(2), word(3), *address);
}

// Eight lanes store the 128 bytes of a row of a panel; a warp covers four rows at a time.
constexpr int kRowsPerStore = kWarp / 8;
constexpr int kStores = kWarpRows / kRowsPerStore;

// Sends a staged panel to its rows' home slots; null where there is none. All lanes call it.
__device__ inline void push_rows(const Element* buffer, int column,
                                 Element* const (&rows)[kStores]) {
  const int lane = threadIdx.x % kWarp;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kStores; ++i) {
    const int row = i * kRowsPerStore + lane / 8;
    const int eighth = (lane ^ row) % 8;
    const uint4 piece = *reinterpret_cast<const uint4*>(buffer + row * kPanelColumns + eighth * 8);
    if (rows[i] != nullptr) {
      *reinterpret_cast<uint4*>(rows[i] + column + lane % 8 * 8) = piece;
    }
  }
}

}  // namespace mok::sm90
