#pragma once

#include <type_traits>

#include "device/inject.cuh"
#include "device/mx_rows.cuh"
#include "device/warp.cuh"
#include "sm90/forward.h"
#include "sm90/ptx.cuh"
#include "sm90/pull_share.h"
#include "sm90/record.cuh"
#include "sm90/rows.cuh"
#include "sm90/tile.h"

// The pulling warps, one a block: fetch each token that this rank needs of a peer once, in the
// order in which the rows of the plan first need them. Those in MXFP8 are expanded on the way; also
// those that peers have pushed, which this rank pulls from its own arena.
namespace mok::sm90 {

// 16-byte loads that a pulling thread has under way: 6 KB a warp, three quarters of a megabyte in
// all. Under the kernel's load a round takes longer the more it has; with 8 loads rows came slower
// (docs/hopper-forward.md).
constexpr int kPullsInFlight = 12;

// Where a thread is in the rows of some lanes, one after the other as one stream.
struct StreamPlace {
  unsigned lanes;  // whose rows it has not passed; it is in the first one's
  int vector;      // its 16 bytes of that row

  __device__ void settle(int vectors) {
    while (lanes != 0 && vector >= vectors) {
      vector -= vectors;
      lanes &= lanes - 1;
    }
  }
};

// Copies rows of so many vectors, those from and to where some lanes point. All lanes call it.
// Nobody may write what is read during the kernel.
__device__ inline void copy_rows(unsigned lanes, const uint4* from, uint4* to, int vectors) {
  StreamPlace place{lanes, static_cast<int>(threadIdx.x) % kWarp};
  const auto visit = [&](StreamPlace at, auto base, const auto& take) {
#pragma unroll
    for (int i = 0; i < kPullsInFlight; ++i) {
      at.settle(vectors);
      const int row = at.lanes != 0 ? __ffs(at.lanes) - 1 : 0;
      const auto begin = reinterpret_cast<decltype(base)>(
          __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(base), row));
      if (at.lanes != 0) {
        take(i, begin + at.vector);
      }
      at.vector += kWarp;
    }
    return at;
  };
  for (int left = __popc(lanes) * vectors; left > 0; left -= kPullsInFlight * kWarp) {
    uint4 values[kPullsInFlight];
    visit(place, from, [&](int i, const uint4* source) { values[i] = load_once(source); });
    place = visit(place, to, [&](int i, uint4* target) { *target = values[i]; });
  }
}

// Of rows in MXFP8: what a warp copies together, and what it has under way, 4 KB of it.
constexpr int kExpandedTogether = 4;
constexpr int kPiecesInFlight = 4;

// Likewise for rows of MXFP8, whose values are written.
__device__ inline void expand_pulled_rows(unsigned lanes, const char* from, Bits16* to,
                                          int32_t width) {
  const int pieces = mx_pieces(width);
  StreamPlace place{lanes, 0};  // the same in all lanes
  const auto visit = [&](StreamPlace at, auto base, const auto& take) {
#pragma unroll
    for (int i = 0; i < kPiecesInFlight; ++i) {
      at.settle(pieces);
      if (at.lanes != 0) {
        const auto begin = reinterpret_cast<decltype(base)>(
            __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(base), __ffs(at.lanes) - 1));
        take(i, begin, at.vector);
      }
      ++at.vector;
    }
    return at;
  };
  for (int left = __popc(lanes) * pieces; left > 0; left -= kPiecesInFlight) {
    MxPiece loaded[kPiecesInFlight];
    visit(place, from,
          [&](int i, const char* row, int piece) { loaded[i] = load_piece(row, width, piece); });
    place = visit(place, to, [&](int i, Bits16* row, int piece) {
      store_piece(loaded[i], row, width, piece);
    });
  }
}

// What is pulled: where rows begin in the peers' arenas and here, in bytes and elements, and
// counters of the tiles' tokens that have come; null if nobody pulls.
struct Pull {
  int64_t offset;
  Bits16* received;
  uint32_t* pulled;
  bool are_pushed;  // those in MXFP8, to this rank's arena
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
    int32_t rank = -1;
    const std::conditional_t<Params::kIsMx, char, Bits16>* from = nullptr;
    Bits16* to = nullptr;
    if (row < rows && (params.to_pull[row / kTileRows] >> (row % kTileRows) & 1) != 0) {
      const int32_t token = params.row_source[row] / params.top_k;
      const int32_t its_rank = token / params.tokens;
      if (share.has(its_rank, params.rank, params.ranks)) {
        rank = its_rank;
        if constexpr (Params::kIsMx) {
          from = encoded_row(params, {pull.offset, pull.are_pushed}, token);
        } else {
          from = reinterpret_cast<const Bits16*>(params.bases[rank] + pull.offset) +
                 int64_t{token - rank * params.tokens} * params.hidden;
        }
        to = pull.received + int64_t{token} * params.hidden;
      }
    }
    for (unsigned left = __ballot_sync(kAllLanes, rank >= 0); left != 0;) {
      unsigned rest = left;
      for (int i = 0; i < (Params::kIsMx ? kExpandedTogether : kPulledTogether); ++i) {
        rest &= rest - 1;
      }
      const unsigned lanes = left ^ rest;
      left = rest;
      const bool is_copied = (lanes >> lane & 1) != 0;
      const bool is_pull = is_copied && !(Params::kIsMx && pull.are_pushed);
      if (inject::warp_drops(Hook::kPullToken, is_pull ? rank : -1)) {
        continue;
      }
      if (lane == 0) {
        const int64_t first_row = first + (__ffs(lanes) - 1) * share.stride;
        record_begin(params, TimelineRole::kPull, static_cast<int32_t>(first_row / kTileRows),
                     __popc(lanes), 0);
      }
      if constexpr (Params::kIsMx) {
        expand_pulled_rows(lanes, from, to, params.hidden);
      } else {
        copy_rows(lanes, reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to),
                  params.hidden / 8);
      }
      __syncwarp();
      if (is_copied) {
        add_release(pull.pulled + row / kTileRows, 1);
      }
      if (lane == 0) {
        record_end(params, TimelineRole::kPull);
      }
    }
  }
}

}  // namespace mok::sm90
