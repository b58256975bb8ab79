#pragma once

#include "sm90/forward.h"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"
#include "sm90/rows.cuh"
#include "sm90/warp.cuh"

// The pulling warps, one a block: fetch each token that this rank needs of a peer once, in the
// order in which the rows of the plan first need them, all blocks together.
namespace mok::sm90 {

__device__ inline void pull_tokens(const ForwardParams& params, int warp, int warps) {
  if (params.pulled == nullptr) {
    return;
  }
  const int lane = threadIdx.x % kWarp;
  const int32_t rows = *params.tile_count * kTileRows;
  for (int32_t first = warp; first < rows; first += warps * kWarp) {
    const int32_t row = first + lane * warps;
    const bool is_needed =
        row < rows && (params.to_pull[row / kTileRows] >> (row % kTileRows) & 1) != 0;
    const int32_t own_token = is_needed ? params.row_source[row] / params.top_k : 0;
    for (unsigned left = __ballot_sync(kAllLanes, is_needed); left != 0; left &= left - 1) {
      const int next = __ffs(left) - 1;
      const int32_t token = __shfl_sync(kAllLanes, own_token, next);
      const int32_t rank = token / params.tokens;
      const int64_t in_rank = token - rank * params.tokens;
      const char* const peer_x = params.bases[rank] + params.x_offset;
      copy_row(reinterpret_cast<const Bits16*>(peer_x) + in_rank * params.hidden,
               params.received + int64_t{token} * params.hidden, params.hidden);
      __syncwarp();
      if (lane == next) {
        add_release(params.pulled + row / kTileRows, 1);
      }
    }
  }
}

}  // namespace mok::sm90
