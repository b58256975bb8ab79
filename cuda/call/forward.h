#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "call/export.h"
#include "call/forward_workspace.h"
#include "call/memory.h"
#include "core/plan.h"

// The call of the forward pass: all that is launched for it, in order.
namespace mok {

struct ForwardCall {
  sm90::ForwardShape shape;
  float clamp;  // infinity for none
  uint64_t timeout_ns;
  void* communicator;  // that of `prepare_peers`, for `arena_layout`; null without peers

  // bf16 where nothing else is said; weights are given rounded to MXFP8, if the shape says so.
  const uint16_t* x;     // [tokens, hidden]
  const int32_t* ids;    // [tokens, top_k]
  const float* weights;  // [tokens, top_k]
  const uint16_t* gate;  // [local experts, hidden, inner]
  const uint16_t* up;
  const uint16_t* down;  // [local experts, inner, hidden]
  uint16_t* y;           // [tokens, hidden]
  Memory workspace;      // of `lay_out`

  // What the backward pass needs if the shape keeps the plan: pre-activations of the first
  // `saved_tiles` tiles, and all tables. Else null and empty.
  uint16_t* saved;
  int32_t saved_tiles;
  PlanTables tables;
};

// Returns what went wrong, or nothing. The device is prepared.
MOK_EXPORT std::string launch_forward_call(const ForwardCall& call, int32_t ordinal,
                                           cudaStream_t stream);

}  // namespace mok
