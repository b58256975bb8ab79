#pragma once

#include <cstdint>

#include "call/arenas.h"
#include "call/export.h"
#include "core/directions.h"
#include "core/plan.h"
#include "core/signature.h"
#include "sm90/forward.h"
#include "sm90/plan.h"
#include "sm90/work_list.h"

// The memory that one forward call needs beside its operands and results: one XLA buffer, in parts.
namespace mok::sm90 {

struct ForwardShape {
  PlanShape plan;
  Directions directions;
  bool composed;    // the moves are kernels of their own, wave by wave
  bool keeps_plan;  // its tables are the caller's
  WorkShape work;
  int64_t ring_rows;
  int64_t hidden;
  int64_t inner;
  bool is_mx;  // products are of operands in MXFP8

  ArenaLayout arena_layout() const {
    return keeps_plan ? gradient_arena(plan, directions, hidden, is_mx)
                      : forward_arena(plan, directions, hidden, is_mx);
  }
  uint64_t signature() const {
    return signature_of(CallKind::kForward, plan, directions, hidden, inner, is_mx);
  }
  bool has_peers() const { return plan.ranks > 1; }
  // Whether the forward kernel pulls: of MXFP8 also what has been pushed, to expand it.
  bool pulls_tokens() const {
    return has_peers() && !composed && (is_mx || !directions.dispatch_push);
  }
  // That the worst load takes; 0 unless composed.
  int32_t waves() const;
};

struct Workspace {
  PlanTables tables;  // unless the caller keeps the plan
  int32_t* routes;    // [ranks, tokens, top_k]; only with peers
  int32_t* plan_scratch;
  uint64_t* to_pull;  // [tiles], within the part that is set to zero; only if tokens are pulled
  WorkList list;
  uint16_t* hidden_ring;  // [ring_rows, inner]
  uint16_t* received;     // [ranks, tokens, hidden]; only if tokens are pulled
  uint16_t* rounded;      // [tokens, hidden] of x in MXFP8; only without peers
  uint16_t* own_slots;    // [tokens, top_k, hidden]; only without peers, if combine pushes
  uint16_t* outputs;      // [max_rows, hidden]; only without peers, if combine pulls

  // Only for the composed pass: a wave's rows.
  uint16_t* dispatched;   // [ring_rows, hidden]
  uint16_t* output_ring;  // [ring_rows, hidden]; only if combine pushes

  // Set to zero before a call: zero_bytes from `zero` on.
  char* zero;
  int64_t zero_bytes;
  int32_t* link_failed;
  int32_t* kernel_failed;
  uint16_t* zeros;         // [hidden]
  uint32_t* next_items;    // one; or two a wave
  uint32_t* hidden_ready;  // [tiles]
  uint32_t* down_done;     // [tiles]
  uint32_t* pulled;        // [tiles]; only if tokens are pulled

  int64_t bytes;
};

// Sizes with the cluster, group and step sizes that measured best.
MOK_EXPORT ForwardShape make_forward_shape(const PlanShape& plan, const Directions& directions,
                                           bool composed, bool keeps_plan, int64_t ring_rows,
                                           int64_t hidden, int64_t inner, bool is_mx);

// Lays the parts out from `base`; with a null base only `bytes` means anything.
MOK_EXPORT Workspace lay_out(const ForwardShape& shape, char* base);

}  // namespace mok::sm90
