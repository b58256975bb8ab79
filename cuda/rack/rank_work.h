#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "core/plan.h"
#include "sm90/pull_share.h"
#include "sm90/work.h"

// What one rank does in a forward call, as the kernels find it: its plan and work list from the
// routes of all ranks, through the same code.
namespace mok::rack {

struct Sizes {
  PlanShape plan;
  int32_t hidden;
  int32_t inner;
  int64_t ring_rows;
};

// Rows of a tile that go to the same home.
struct Homes {
  int32_t home;
  int32_t rows;
};

struct RankWork {
  sm90::WorkShape shape;
  std::vector<sm90::WorkItem> items;
  std::vector<int32_t> token_home;      // [rows] of the peer's token that is pulled for it; else -1
  std::vector<int32_t> pull_order;      // [rows] the plan's, over real rows
  std::vector<int32_t> tokens_of_tile;  // [tiles] that are pulled for it
  std::vector<int32_t> first_homes;     // [tiles + 1] where those of a tile begin
  std::vector<Homes> homes;
  std::vector<int32_t> token_targets;  // the peers that need each of its tokens, token by token
  std::vector<int32_t> choice_rank;    // [choices] that has the output row; -1 for none

  int32_t tiles() const { return static_cast<int32_t>(tokens_of_tile.size()); }
};

// `routes` are [ranks, tokens, top_k]. A token comes to a rank once, as in the kernels, or for each
// of its choices there.
RankWork work_of(const Sizes& sizes, std::span<const int32_t> routes, int32_t rank,
                 bool repeats_tokens);

struct PulledToken {
  int32_t tile;
  int32_t home;
};

// Tokens that a warp copies together.
struct Pull {
  int32_t looks;  // at so many rows of the plan as a warp has lanes, since the one before
  int32_t count;
  std::array<PulledToken, sm90::kPulledTogether> tokens;
};

enum class PullOrder : int32_t {
  kPeers,  // as the kernel does, see sm90/pull_share.h
  kRows,   // every warp takes every so-many-th row of the plan, whoever has its token
  kPlan,   // likewise of the plan's pull order: chunk by chunk, from all ranks in turn
};

// Of each warp, in order.
std::vector<std::vector<Pull>> pulls_of(const RankWork& work, PullOrder order, int32_t rank,
                                        int32_t ranks, int32_t warps);

}  // namespace mok::rack
