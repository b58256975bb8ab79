#pragma once

#include <cstdint>

#include "core/plan.h"

// Who pulls what: peers have warps of their own, so that at any moment all ranks pull from many
// others, though the rows of an expert come rank by rank; and all warps have about as much to pull,
// since products wait for the slowest one.
namespace mok::sm90 {

// Tokens that a warp copies together: most rounds are then full, and one fence serves them all.
constexpr int kPulledTogether = 3;

// What a warp goes through: every `stride`-th row of the plan, for the tokens of some peers.
struct PullShare {
  int32_t peers;  // that are told apart
  int32_t visit;  // the peers that the warp visits: every `peers`-th
  int32_t first;  // row
  int32_t stride;

  MOK_HOST_DEVICE bool has(int32_t source, int32_t rank, int32_t ranks) const {
    return visit_index(source, rank, ranks) % peers == visit;
  }
};

// How many peers are told apart: the most with which no warp has a thirty-second more to do than if
// all had the same, every peer's tokens being as many.
inline int32_t peers_apart(int32_t peers, int32_t warps) {
  const auto fits = [&](int32_t some_peers, int32_t some_warps) {
    return 32 * some_peers * warps <= 33 * peers * some_warps;
  };
  for (int32_t apart = peers < warps ? peers : warps; apart > 1; --apart) {
    // The first visits are of one peer more, and the first ones have one warp more.
    const int32_t least_peers = peers / apart;
    const int32_t least_warps = warps / apart;
    const int32_t with_most_peers = least_warps + (peers % apart <= warps % apart ? 1 : 0);
    if (fits(least_peers, least_warps) &&
        (peers % apart == 0 || fits(least_peers + 1, with_most_peers))) {
      return apart;
    }
  }
  return 1;
}

// Of one of so many warps.
MOK_HOST_DEVICE inline PullShare pull_share(int32_t peers, int32_t warp, int32_t warps) {
  const int32_t visit = warp % peers;
  return {peers, visit, warp / peers, (warps - visit + peers - 1) / peers};
}

}  // namespace mok::sm90
