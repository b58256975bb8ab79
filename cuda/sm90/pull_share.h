#pragma once

#include <cstdint>

#include "core/plan.h"

// Who pulls what: every peer has warps of its own, so that at any moment all ranks pull from all
// others, though the rows of an expert come rank by rank.
namespace mok::sm90 {

// What a warp goes through: every `stride`-th row of the plan, for the tokens of some peers.
struct PullShare {
  int32_t peers;  // that are told apart: all, or as many as there are warps
  int32_t visit;  // the peers that the warp visits: every `peers`-th
  int32_t first;  // row
  int32_t stride;

  MOK_HOST_DEVICE bool has(int32_t source, int32_t rank, int32_t ranks) const {
    return visit_index(source, rank, ranks) % peers == visit;
  }
};

// Of one of so many warps, where there are peers.
MOK_HOST_DEVICE inline PullShare pull_share(int32_t ranks, int32_t warp, int32_t warps) {
  const int32_t peers = ranks - 1 < warps ? ranks - 1 : warps;
  const int32_t visit = warp % peers;
  return {peers, visit, warp / peers, (warps - visit + peers - 1) / peers};
}

}  // namespace mok::sm90
