#pragma once

#include "core/plan.h"
#include "device/warp.cuh"
#include "sm90/backward.h"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"
#include "sm90/rows.cuh"

namespace mok::sm90 {

// As pull_tokens of the forward kernel, pull.cuh, the output's gradient first: it is needed first.
__device__ inline void pull_gradients(const BackwardParams& params, int warp, int warps) {
  if (params.pulled == nullptr || *params.fault != 0 || *params.skip != 0) {
    return;
  }
  const int lane = threadIdx.x % kWarp;
  const int peers = min(params.ranks - 1, warps);
  const int visit = warp % peers;
  const int stride = (warps - visit + peers - 1) / peers;
  const int64_t rows = int64_t{*params.tile_count} * kTileRows;
  for (int64_t first = warp / peers; first < rows; first += stride * kWarp) {
    const int64_t row = first + lane * stride;
    int32_t own_token = -1;
    if (row < rows && (params.to_pull[row / kTileRows] >> (row % kTileRows) & 1) != 0) {
      const int32_t token = params.row_source[row] / params.top_k;
      if (visit_index(token / params.tokens, params.rank, params.ranks) % peers == visit) {
        own_token = token;
      }
    }
    for (unsigned left = __ballot_sync(kAllLanes, own_token >= 0); left != 0; left &= left - 1) {
      const int next = __ffs(left) - 1;
      const int32_t token = __shfl_sync(kAllLanes, own_token, next);
      const int32_t rank = token / params.tokens;
      const int64_t from = int64_t{token - rank * params.tokens} * params.hidden;
      const int64_t to = int64_t{token} * params.hidden;
      const char* const base = params.bases[rank];
      copy_row(reinterpret_cast<const Bits16*>(base + params.dy_offset) + from,
               params.received_dy + to, params.hidden);
      copy_row(reinterpret_cast<const Bits16*>(base + params.x_offset) + from,
               params.received_x + to, params.hidden);
      __syncwarp();
      if (lane == next) {
        add_release(params.pulled + row / kTileRows, 1);
      }
    }
  }
}

}  // namespace mok::sm90
