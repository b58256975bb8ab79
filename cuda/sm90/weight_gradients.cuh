#pragma once

#include <cutlass/arch/barrier.h>

#include "sm90/backward.h"
#include "sm90/epilogue.cuh"

// From the accumulators of the weights' gradients to the matrices, by tensor stores of 128 bytes a
// row. A warpgroup holds 64 rows of H by 256 columns of I; it stages them in two buffers by turns,
// as many columns at a time as fill one.
namespace mok::sm90 {

constexpr int kWeightBufferBytes = kTileRows * kSwizzleBytes;
constexpr int kQuadColumns = 8;  // a row's columns that the four lanes of a quad hold together

template <typename Out>
struct WeightStep {
  static constexpr int kColumns = kSwizzleBytes / static_cast<int>(sizeof(Out));
  static constexpr int kCount = kBlockColumns / kColumns;
  static constexpr int kValues = kAccumulators / kCount;
};

// The 16 bytes that hold the element in this column of a buffer's row.
__device__ inline char* chunk_of(char* buffer, int row, int column_bytes) {
  return buffer + row * kSwizzleBytes + ((column_bytes / 16) ^ (row % 8)) * 16;
}

// `values` begin at this column of f32.
template <typename Values>
__device__ void put(char* buffer, int row, int column, Values values) {
  const int bytes = column * static_cast<int>(sizeof(float));
  *reinterpret_cast<Values*>(chunk_of(buffer, row, bytes) + bytes % 16) = values;
}

// Rows of H, the columns of the step: [64][64] of bf16.
__device__ inline void stage_step(char* buffer, int warp, const float* values, Element) {
  auto* const rows = reinterpret_cast<Element*>(buffer + warp * kWarpRows * kSwizzleBytes);
#pragma unroll
  for (int group = 0; group < kPanelGroups; ++group) {
    stage_group(rows, group, [&](int i) { return pack_pair(values, group, i); });
  }
}

// [64][32] of f32.
__device__ inline void stage_step(char* buffer, int warp, const float* values, float) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < WeightStep<float>::kValues; i += 2) {
    const int row = warp * kWarpRows + i / 2 % 2 * 8 + lane / 4;
    const int column = i / 4 * kQuadColumns + lane % 4 * 2;
    put(buffer, row, column, float2{values[i], values[i + 1]});
  }
}

// Transposed: rows are the columns of the step, columns those of H. [64][64] of bf16.
__device__ inline void stage_transposed(char* buffer, int warp, const float* values, Element) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int group = 0; group < kPanelGroups; ++group) {
    const int row = group * kGroupColumns + lane / 16 * 8 + lane % 8;
    const int column = warp * kWarpRows + lane / 8 % 2 * 8;
    auto* const chunk = reinterpret_cast<cute::uint128_t*>(
        chunk_of(buffer, row, column * static_cast<int>(sizeof(Element))));
    cute::SM90_U16x8_STSM_T::copy(pack_pair(values, group, 0), pack_pair(values, group, 1),
                                  pack_pair(values, group, 2), pack_pair(values, group, 3), *chunk);
  }
}

// Of f32 a row of 64 columns is wider than the swizzle: two boxes of [32][32], one behind the
// other.
__device__ inline void stage_transposed(char* buffer, int warp, const float* values, float) {
  const int lane = threadIdx.x % kWarp;
  char* const box = buffer + warp / 2 * (kWeightBufferBytes / 2);
#pragma unroll
  for (int i = 0; i < WeightStep<float>::kValues; ++i) {
    const int row = i / 4 * kQuadColumns + lane % 4 * 2 + i % 2;
    const int column = warp % 2 * kWarpRows + i / 2 % 2 * 8 + lane / 4;
    put(box, row, column, values[i]);
  }
}

// Where an item's gradient goes.
struct WeightPlace {
  bool is_down;
  int32_t expert;
  int32_t row;     // of H, of this warpgroup's 64
  int32_t column;  // of I, the first of the item's columns
};

// All threads of the warpgroup call it; `buffers` are its own two. Nobody else may use them, or
// have stores under way from them.
template <typename Out>
__device__ __forceinline__ void store_weights(const BackwardParams& params,
                                              const WeightPlace& place, int half, char* buffers,
                                              const float (&accumulators)[kAccumulators]) {
  using Step = WeightStep<Out>;
  if (place.row >= params.hidden) {
    return;
  }
  const int thread = threadIdx.x % kWarpgroup;
  const int warp = thread / kWarp;
#pragma unroll
  for (int step = 0; step < Step::kCount; ++step) {
    const int panel = step * Step::kColumns / kPanelColumns;
    const int in_panel = step * Step::kColumns % kPanelColumns;
    const int matrix_panel = place.is_down ? panel : panel / 2;  // of gate and up by turns
    const int column = place.column + matrix_panel * kPanelColumns + in_panel;
    if (column >= params.inner) {
      break;
    }
    char* const buffer = buffers + step % 2 * kWeightBufferBytes;
    const float* const values = accumulators + step * Step::kValues;
    if (thread == 0) {
      cute::tma_store_wait<1>();  // the step before the last one has been read
    }
    cutlass::arch::NamedBarrier::sync(kWarpgroup, half);
    if (place.is_down) {
      stage_transposed(buffer, warp, values, Out{});
    } else {
      stage_step(buffer, warp, values, Out{});
    }
    cute::tma_store_fence();
    cutlass::arch::NamedBarrier::sync(kWarpgroup, half);
    if (thread == 0) {
      if (place.is_down) {
        const int row = place.expert * params.inner + column;
        for (int box = 0; box < kTileRows / Step::kColumns; ++box) {
          cute::SM90_TMA_STORE_2D::copy(&params.d_down, buffer + box * (kWeightBufferBytes / 2),
                                        place.row + box * Step::kColumns, row);
        }
      } else {
        cute::SM90_TMA_STORE_2D::copy(panel % 2 == 0 ? &params.d_gate : &params.d_up, buffer,
                                      column, place.expert * params.hidden + place.row);
      }
      cute::tma_store_arrive();
    }
  }
  // The buffers are all warps' again when the thread that stored from them has waited.
  if (thread == 0) {
    cute::tma_store_wait<0>();
  }
  cutlass::arch::NamedBarrier::sync(kWarpgroup, half);
}

}  // namespace mok::sm90
