#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "call/arenas.h"
#include "call/export.h"
#include "call/memory.h"
#include "core/directions.h"
#include "core/plan.h"
#include "link/arena_layout.h"
#include "sm90/backward_work.h"

// The call of the backward pass: all that is launched for it, in order.
namespace mok {

struct BackwardSizes {
  PlanShape plan;
  Directions directions;
  bool composed;
  int64_t ring_rows;
  int64_t saved_rows;
  int64_t hidden;
  int64_t inner;

  ArenaLayout arena_layout() const { return gradient_arena(plan, directions, hidden); }
  bool has_peers() const { return plan.ranks > 1; }
  // Whether the kernel pulls them. (The composed pass pulls row by row.)
  bool pulls_x() const { return has_peers() && !composed && !directions.dispatch_push; }
  bool pulls_dy() const { return has_peers() && !composed && !directions.reverse_combine_push; }
  // Whether the gradients of pre-activations replace those saved, instead of lying in memory of
  // their own: of a tile they take the same place in the ring, from which later waves keep away
  // until it is free.
  bool replaces_saved() const { return saved_rows >= std::min(ring_rows, plan.max_rows()); }
  bool pulls() const { return pulls_x() || pulls_dy(); }
  // Home slots of this rank's choices, or rows that its experts may have to take.
  int64_t dx_rows() const {
    return directions.reverse_dispatch_push ? plan.choices() : plan.max_rows();
  }
};

struct BackwardCall {
  BackwardSizes sizes;
  float clamp;  // infinity for none
  uint64_t timeout_ns;
  void* communicator;  // that of `prepare_peers`, for `arena_layout`; null without peers

  // bf16 where nothing else is said.
  const uint16_t* x;     // [tokens, hidden]
  const uint16_t* dy;    // [tokens, hidden]
  const float* weights;  // [tokens, top_k] of the router
  const uint16_t* gate;  // [local experts, hidden, inner]
  const uint16_t* up;
  const uint16_t* down;       // [local experts, inner, hidden]
  const int32_t* row_source;  // of the plan, likewise the next three
  const int32_t* expert_tile;
  const int32_t* slot_rank;
  const int32_t* slot_row;

  uint16_t* dx;      // [tokens, hidden]
  float* d_weights;  // [tokens, top_k]
  uint16_t* saved;   // pre-activations of the first rows, see ForwardCall; of no use after the call
  void* d_gate;      // as the weights, in f32 or bf16
  void* d_up;
  void* d_down;
  bool dw_is_f32;
  Memory workspace;  // of `backward_workspace_bytes`
};

MOK_EXPORT int64_t backward_workspace_bytes(const BackwardSizes& sizes);

// Returns what went wrong, or nothing. The device is prepared.
MOK_EXPORT std::string launch_backward_call(const BackwardCall& call, int32_t ordinal,
                                            cudaStream_t stream);

}  // namespace mok
