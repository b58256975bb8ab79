#pragma once

#include <cstdint>

#include "core/plan.h"
#include "device/warp.cuh"
#include "sm90/tile.h"

// How the kernels that move the rows of a wave share them out.
namespace mok::sm90 {

constexpr int kMoveThreads = 256;
constexpr int kMoveBlocks = 4 * 132;

// Calls move(row, slot) for each row of these tiles that is not padding; a warp takes a row.
template <typename Move>
__device__ void for_each_row(const int32_t* row_source, int32_t first_tile, int32_t end_tile,
                             const Move& move) {
  const int warp = (blockIdx.x * kMoveThreads + threadIdx.x) / kWarp;
  const int64_t end = int64_t{end_tile} * kTileRows;
  for (int64_t row = int64_t{first_tile} * kTileRows + warp; row < end;
       row += kMoveBlocks * kMoveThreads / kWarp) {
    const int32_t slot = row_source[row];
    if (slot != kPadding) {
      move(static_cast<int32_t>(row), slot);
    }
  }
}

}  // namespace mok::sm90
