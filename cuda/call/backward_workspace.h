#pragma once

#include <algorithm>
#include <cstdint>

#include "call/arenas.h"
#include "call/export.h"
#include "core/directions.h"
#include "core/plan.h"
#include "core/signature.h"
#include "sm90/backward_list.h"

// The memory that one backward call needs beside its operands and results: one XLA buffer, in
// parts.
namespace mok {

struct BackwardSizes {
  PlanShape plan;
  Directions directions;
  bool composed;
  int64_t ring_rows;
  int64_t saved_rows;
  int64_t hidden;
  int64_t inner;
  bool is_mx;  // products are of operands in MXFP8

  ArenaLayout arena_layout() const { return gradient_arena(plan, directions, hidden, is_mx); }
  uint64_t signature() const {
    return signature_of(CallKind::kBackward, plan, directions, hidden, inner, is_mx);
  }
  bool has_peers() const { return plan.ranks > 1; }
  // Whether the kernel pulls them: of MXFP8 also what has been pushed, to expand it. (The composed
  // pass pulls row by row.)
  bool pulls_x() const { return pulls_unless(directions.dispatch_push); }
  bool pulls_dy() const { return pulls_unless(directions.reverse_combine_push); }
  bool pulls() const { return pulls_x() || pulls_dy(); }
  // Whether the ring of the gradients of pre-activations is the memory of those saved. A wave has
  // no more tiles than the ring, so the place of a tile in it is that of the same tile's saved
  // ones, or of those of a tile of a wave that has ended.
  bool replaces_saved() const { return saved_rows >= std::min(ring_rows, plan.max_rows()); }
  // Home slots of this rank's choices, or rows that its experts may have to take.
  int64_t dx_rows() const {
    return directions.reverse_dispatch_push ? plan.choices() : plan.max_rows();
  }
  // Whether the lower halves of partial sums replace, if an expert is split among waves, the last
  // pre-activations that are saved: beyond the ring, where gradients replace them.
  bool halves_replace_saved() const;
  // Tiles whose pre-activations are saved.
  sm90::SavedTiles saved_tiles() const;
  sm90::BackwardShape shape() const;

 private:
  bool pulls_unless(bool are_pushed) const {
    return has_peers() && !composed && (is_mx || !are_pushed);
  }
};

constexpr int kWaveLaunches = 4;  // of a wave of the composed pass, with items

struct BackwardWorkspace {
  sm90::BackwardList list;
  uint16_t* gradient_ring;  // [ring_rows, 2, inner]; only if it does not replace what is saved
  uint16_t* hidden_ring;    // [ring_rows, inner]
  float* dot_parts;         // [ring_rows, blocks of 128 of inner]
  uint4* lower_halves;      // of partial sums; only if there may be any, and not in what is saved
  uint16_t* received_x;     // [ranks, tokens, hidden]; only if the kernel pulls them
  uint16_t* received_dy;    // likewise
  uint16_t* rounded_x;      // [tokens, hidden] in MXFP8; only without peers
  uint16_t* rounded_dy;     // likewise
  float* weights;           // [ranks, tokens, top_k]; only with peers
  uint16_t* dx_rows;        // home slots or rows of dx, [rows, hidden]; only without peers
  float* d_weights;         // likewise of the router weights' gradients, [rows]

  // Only for the composed pass, [ring_rows, hidden]: a wave's rows.
  uint16_t* x_ring;
  uint16_t* dy_ring;
  uint16_t* dx_ring;  // only if they are pushed

  // Set to zero before a call: zero_bytes from `zero` on.
  char* zero;
  int64_t zero_bytes;
  int32_t* link_failed;
  int32_t* kernel_failed;
  int32_t* counts;         // of no plan: the forward call has reported its counts
  uint16_t* zeros;         // [hidden]
  uint32_t* next_items;    // one; or one a launch
  uint32_t* replayed;      // [tiles]
  uint32_t* hidden_ready;  // [tiles]
  uint32_t* wave_done;     // [waves]
  uint32_t* x_pulled;      // [tiles]; only if the kernel pulls them
  uint32_t* dy_pulled;

  int64_t bytes;
};

// Lays the parts out from `base`; with a null base only `bytes` means anything.
MOK_EXPORT BackwardWorkspace lay_out(const BackwardSizes& sizes, char* base);

}  // namespace mok
