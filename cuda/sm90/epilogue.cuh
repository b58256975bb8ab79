#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"

// From accumulators to bf16 rows. A thread of a warpgroup's accumulator holds, for every eight
// columns, two neighbouring values of a row and two of the row eight below.
namespace mok::sm90 {

constexpr int kPanelAccumulators = kTileRows * kPanelColumns / kWarpgroup;

__device__ inline float silu(float gate) {
  float power, quotient;
  constexpr float kMinusLog2E = -1.4426950408889634f;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(gate, kMinusLog2E)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(__fadd_rn(1.0f, power)));
  return __fmul_rn(gate, quotient);
}

__device__ inline float swiglu(float gate, float up, float clamp) {
  // Written so that a NaN stays one.
  gate = gate > clamp ? clamp : gate;
  up = up > clamp ? clamp : (up < -clamp ? -clamp : up);
  return __fmul_rn(silu(gate), up);
}

// Writes a warp's 16 rows of a panel, 128 bytes each, in the 128-byte swizzle. `value(i)` is the
// i-th of this thread's accumulators of the panel.
template <typename Value>
__device__ void stage_panel(Element* buffer, const Value& value) {
  const int lane = threadIdx.x % kWarp;
  const int row = lane % kWarpRows;
#pragma unroll
  for (int pair = 0; pair < kPanelAccumulators / 8; ++pair) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      packed[i] = pack_bf16(value(pair * 8 + i * 2), value(pair * 8 + i * 2 + 1));
    }
    const int eighth = (pair * 2 + lane / kWarpRows) ^ (row % 8);
    auto* const address =
        reinterpret_cast<cute::uint128_t*>(buffer + row * kPanelColumns + eighth * 8);
    cute::SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3], *address);
  }
}

// Sends a staged panel of hidden rows to the ring. All lanes call it.
__device__ inline void store_hidden(const CUtensorMap* map, const Element* buffer, int column,
                                    int ring_row) {
  cute::tma_store_fence();
  __syncwarp();
  if (threadIdx.x % kWarp == 0) {
    cute::SM90_TMA_STORE_2D::copy(map, buffer, column, ring_row);
    cute::tma_store_arrive();
  }
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
