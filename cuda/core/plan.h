#pragma once

#include <cstdint>

#include "core/host_device.h"

// The plan of one call: which row of which rank holds which choice of which token.
//
// A choice is one of the top_k experts of one token; its global slot is
// (rank * tokens + token) * top_k + k. The rows of an expert are its choices in the order of their
// global slots; experts ascend and each begins at a tile boundary. That order, the canonical one,
// does not depend on how many ranks share the experts, and every result inherits this.
//
// This header defines the tables and the arithmetic of their entries; a builder walks the routes
// in its own way (host/plan_builder.cc one choice after the other).
namespace mok {

struct PlanShape {
  int32_t ranks;
  int64_t tokens;  // per rank
  int32_t top_k;
  int32_t experts;  // of all ranks; a multiple of ranks
  int32_t tile_rows;
  int64_t chunk_rows;  // a multiple of tile_rows; pulls are interleaved within a chunk

  MOK_HOST_DEVICE int32_t local_experts() const { return experts / ranks; }
  MOK_HOST_DEVICE int64_t choices() const { return tokens * top_k; }

  // Every choice of every rank may go to one rank, and each of its experts may end in a tile with
  // a single real row.
  MOK_HOST_DEVICE int64_t max_tiles() const {
    const int64_t rows = ranks * choices();
    const int64_t used_experts = local_experts() < rows ? local_experts() : rows;
    return (rows + used_experts * (tile_rows - 1)) / tile_rows;
  }
  MOK_HOST_DEVICE int64_t max_rows() const { return max_tiles() * tile_rows; }

  MOK_HOST_DEVICE int64_t tiles(int64_t rows) const { return (rows + tile_rows - 1) / tile_rows; }
  MOK_HOST_DEVICE bool is_expert(int32_t id) const { return id >= 0 && id < experts; }
  MOK_HOST_DEVICE int32_t owner(int32_t expert) const { return expert / local_experts(); }
};

constexpr int32_t kMaskedChoice = -1;
constexpr int32_t kPadding = -1;
constexpr int32_t kNoPlan = -1;  // expert_tile[0] of a call that has failed

enum PlanCount : int { kRows, kTiles, kMostTiles, kMasked, kOutOfRange, kPlanCounts };

// The tables of one rank. Python's `Plan` documents the same fields.
struct PlanTables {
  int32_t* row_source;   // [max_rows] global slot, or kPadding
  int32_t* pull_order;   // [max_rows] row positions, chunk by chunk, or kPadding
  int32_t* tile_expert;  // [max_tiles] local expert, or kPadding
  int32_t* expert_tile;  // [local_experts + 1] first tile of each expert
  int32_t* expert_rows;  // [local_experts]
  int32_t* slot_rank;    // [tokens, top_k] rank that owns the choice's expert, or kMaskedChoice
  int32_t* slot_row;     // [tokens, top_k] its row there, or kMaskedChoice
  int32_t* counts;       // [kPlanCounts]
};

// What the moves of rows read of a plan.
struct PlanView {
  const int32_t* row_source;
  const int32_t* pull_order;
  const int32_t* slot_rank;
  const int32_t* slot_row;
  const int32_t* counts;
};

// Whether a choice's row is the first on its expert's rank that needs its token: the token's other
// choices there have higher experts, or the same one and come later. `choice` is the global slot of
// one that has an expert; `routes` are those of all ranks.
MOK_HOST_DEVICE inline bool needs_first(const PlanShape& shape, const int32_t* routes,
                                        int64_t choice) {
  const int32_t id = routes[choice];
  const int64_t first = choice / shape.top_k * shape.top_k;
  for (int64_t other = first; other < first + shape.top_k; ++other) {
    const int32_t other_id = routes[other];
    const bool is_there = shape.is_expert(other_id) && shape.owner(other_id) == shape.owner(id);
    if (is_there && (other_id < id || (other_id == id && other < choice))) {
      return false;
    }
  }
  return true;
}

// In a round of pulls a rank visits its right neighbour first and itself last, so at any moment
// the ranks pull from different peers.
MOK_HOST_DEVICE inline int32_t visit_index(int32_t source, int32_t rank, int32_t ranks) {
  return (source - rank - 1 + ranks) % ranks;
}

// Position in the pull order of the `index`-th row that a chunk takes from the source visited as
// number `visit`; `rows_of_visit[v]` rows come from the source visited as number v.
MOK_HOST_DEVICE inline int64_t pull_position(const int32_t* rows_of_visit, int32_t ranks,
                                             int32_t visit, int32_t index) {
  int64_t position = 0;
  for (int32_t v = 0; v < ranks; ++v) {
    const int32_t taken = v < visit ? index + 1 : index;
    position += taken < rows_of_visit[v] ? taken : rows_of_visit[v];
  }
  return position;
}

}  // namespace mok
