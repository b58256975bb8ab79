#pragma once

#include <cstdint>

#include "core/plan.h"
#include "device/inject.cuh"
#include "device/mx_rows.cuh"
#include "device/warp.cuh"
#include "sm90/ptx.cuh"
#include "sm90/rows.cuh"
#include "sm90/tile.h"

// How the kernels that move the rows of a wave share them out, and how a warp copies or expands
// one.
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

// 16-byte loads that a copying thread has under way.
constexpr int kLoadsInFlight = 8;

// All lanes call it. Nobody may write `from` during the kernel.
__device__ inline void copy_row(const void* from, void* to, int32_t width) {
  const int vectors = width / 8;
  const auto* const source = static_cast<const uint4*>(from);
  auto* const destination = static_cast<uint4*>(to);
  for (int begin = threadIdx.x % kWarp; begin < vectors; begin += kLoadsInFlight * kWarp) {
    uint4 values[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      if (begin + i * kWarp < vectors) {
        values[i] = load_once(source + begin + i * kWarp);
      }
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      if (begin + i * kWarp < vectors) {
        destination[begin + i * kWarp] = values[i];
      }
    }
  }
}

// Expands a row of MXFP8. All lanes call it. Nobody may write `from` during the kernel.
__device__ inline void expand_row(const char* from, Bits16* to, int32_t width) {
  constexpr int kAtOnce = 4;
  const int pieces = mx_pieces(width);
  for (int begin = 0; begin < pieces; begin += kAtOnce) {
    MxPiece loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      loaded[i] = load_piece(from, width, begin + i);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      store_piece(loaded[i], to, width, begin + i);
    }
  }
}

// Expands a token of MXFP8, this rank's own ones too, from the arena that shows it or to which it
// has been pushed. All lanes call it.
template <typename Params>
__device__ void expand_token(const Params& params, const EncodedRows& tokens, int32_t slot,
                             Bits16* to) {
  if (!tokens.are_pushed) {
    inject::warp_delays(Hook::kPullWaveToken, slot / params.choices);
  }
  expand_row(encoded_row(params, tokens, slot / params.top_k), to, params.hidden);
}

}  // namespace mok::sm90
