#pragma once

#include "device/inject.cuh"
#include "device/warp.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"
#include "sm90/pull_share.h"
#include "sm90/record.cuh"
#include "sm90/rows.cuh"

// The pulling warps, one a block: fetch each token that this rank needs of a peer once, in the
// order in which the rows of the plan first need them.
namespace mok::sm90 {

// What is pulled: where rows begin in the peers' arenas and here, in bytes and elements, and
// counters of the tiles' tokens that have come; null if nobody pulls.
struct Pull {
  int64_t offset;
  Bits16* received;
  uint32_t* pulled;
};

template <typename Params>
__device__ void pull_tokens(const Params& params, const Pull& pull, int warp, int warps) {
  if (pull.pulled == nullptr || *params.fault != 0) {
    return;
  }
  const int lane = threadIdx.x % kWarp;
  const PullShare share = pull_share(params.peers_apart, warp, warps);
  const int64_t rows = int64_t{*params.tile_count} * kTileRows;
  for (int64_t first = share.first; first < rows; first += share.stride * kWarp) {
    const int64_t row = first + lane * share.stride;
    int32_t own_token = -1;
    if (row < rows && (params.to_pull[row / kTileRows] >> (row % kTileRows) & 1) != 0) {
      const int32_t token = params.row_source[row] / params.top_k;
      if (share.has(token / params.tokens, params.rank, params.ranks)) {
        own_token = token;
      }
    }
    for (unsigned left = __ballot_sync(kAllLanes, own_token >= 0); left != 0; left &= left - 1) {
      const int next = __ffs(left) - 1;
      const int32_t token = __shfl_sync(kAllLanes, own_token, next);
      const int32_t rank = token / params.tokens;
      if (inject::warp_drops(Hook::kPullToken, rank)) {
        continue;
      }
      if (lane == 0) {
        const int64_t its_row = first + next * share.stride;
        record_begin(params, TimelineRole::kPull, static_cast<int32_t>(its_row / kTileRows), rank,
                     0);
      }
      const auto* const rows = reinterpret_cast<const Bits16*>(params.bases[rank] + pull.offset);
      copy_row(rows + int64_t{token - rank * params.tokens} * params.hidden,
               pull.received + int64_t{token} * params.hidden, params.hidden);
      __syncwarp();
      if (lane == next) {
        add_release(pull.pulled + row / kTileRows, 1);
      }
      if (lane == 0) {
        record_end(params, TimelineRole::kPull);
      }
    }
  }
}

}  // namespace mok::sm90
