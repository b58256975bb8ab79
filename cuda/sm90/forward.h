#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/timeline.h"
#include "sm90/work.h"

// dispatch, gate/up, SwiGLU, down and push to the home slots, in one persistent kernel. Without the
// moves whose direction is the other one: tokens that peers have pushed, rows that they will pull.
// Or a range of the work list, for callers that do the moves apart.
namespace mok::sm90 {

using Bits16 = uint16_t;  // a bf16, where nobody computes with it

// Gates are limited to at most `limit`, ups to at most +-limit.
struct Clamp {
  float limit;      // infinity for none
  float below;      // the largest bf16 below it
  float not_below;  // the smallest bf16 not below it

  MOK_HOST_DEVICE bool is_finite() const { return below < not_below; }
};

// Rows by their number in the plan: row r lies at r % count.
struct RowRing {
  Bits16* rows;  // [count, hidden]
  int32_t count;
};

struct ForwardParams {
  // Boxes of 64 x 64: panels of the weights [experts * rows, columns], tiles of the hidden ring.
  CUtensorMap gate;
  CUtensorMap up;
  CUtensorMap down;
  CUtensorMap hidden_tiles;
  CUtensorMap hidden_warps;  // the same ring in boxes of 16 rows, for stores

  const Bits16* x;     // [tokens, hidden] of this rank, written before the kernel
  Bits16* received;    // [ranks, tokens, hidden] the peers' tokens, pulled or pushed
  RowRing dispatched;  // the rows' tokens; null: they are read where they lie, x and received
  RowRing outputs;     // where output rows go; null: to the home slots
  Bits16* own_slots;   // home slots [tokens * top_k, hidden] of this rank, if it has no peers
  char* const* bases;  // [ranks] where each rank's arena begins; null without peers
  int64_t x_offset;    // of the tokens of a rank in its arena
  int64_t slots_offset;
  bool x_is_pushed;     // of MXFP8: tokens lie in this rank's arena, those of all ranks
  const Bits16* zeros;  // [hidden] the token of padding
  const int32_t* row_source;
  const WorkItem* items;
  const ItemRange* range;
  const int32_t* tile_count;
  const uint64_t* to_pull;  // [tiles] bit r: row r is the first that needs its token, a peer's;
                            // null if nobody pulls
  uint32_t* pulled;         // [tiles] tokens pulled for a tile's rows; null if nobody pulls
  uint32_t* next_item;      // of the range, zero before
  uint32_t* hidden_ready;   // [tiles] stores of the tile's hidden rows
  uint32_t* down_done;      // [tiles] column blocks whose reads of the hidden rows have ended
  int32_t* fault;  // set to 1 when a wait has expired; if it is set before, nothing is done

  // Pre-activations of the first `saved_tiles` tiles, bf16 in the order in which the accumulators'
  // threads hold them, 16 bytes each: [tile][64 columns][gate, up][warp][16 columns][lane][8]. The
  // eight are two neighbouring columns of row lane / 4 of the warp's 16, from column lane % 4 * 2
  // on; the same of the row eight below; and both again eight columns on.
  Bits16* saved;
  int32_t saved_tiles;

  int32_t hidden;
  int32_t inner;
  int32_t ranks;
  int32_t rank;
  int32_t tokens;  // per rank
  int32_t top_k;
  int32_t choices;  // per rank
  int32_t ring_tiles;
  int32_t gate_up_columns;
  int32_t down_columns;
  Clamp clamp;
  uint64_t timeout_ns;
  int32_t peers_apart;  // see sm90/pull_share.h

  static constexpr bool kRecords = false;
  static constexpr bool kIsMx = false;
};

// Of the kernel that keeps a timeline.
struct RecordedForwardParams : ForwardParams {
  Timeline timeline;

  static constexpr bool kRecords = true;
};

// Of the kernels that round hidden rows to MXFP8, and expand the tokens that they pull. `x` and the
// weights are given rounded.
struct MxForwardParams : ForwardParams {
  static constexpr bool kIsMx = true;
};
struct RecordedMxForwardParams : RecordedForwardParams {
  static constexpr bool kIsMx = true;
};

// Loads the kernel and finds how many clusters fit the device at once. Not for a captured stream.
cudaError_t prepare_forward(int* clusters);
cudaError_t prepare_mx_forward(int* clusters);

// Keeps a timeline if `timeline` has entries.
cudaError_t launch_forward(const ForwardParams& params, const Timeline& timeline, int clusters,
                           cudaStream_t stream);
cudaError_t launch_mx_forward(const ForwardParams& params, const Timeline& timeline, int clusters,
                              cudaStream_t stream);

}  // namespace mok::sm90
