#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "call/backward_workspace.h"
#include "call/export.h"
#include "call/memory.h"

// The call of the backward pass: all that is launched for it, in order.
namespace mok {

struct BackwardCall {
  BackwardSizes sizes;
  float clamp;  // infinity for none
  uint64_t timeout_ns;
  void* communicator;  // that of `prepare_peers`, for `arena_layout`; null without peers

  // bf16 where nothing else is said; weights are given rounded to MXFP8, if the sizes say so, for
  // the products of the backward pass.
  const uint16_t* x;     // [tokens, hidden]
  const uint16_t* dy;    // [tokens, hidden]
  const float* weights;  // [tokens, top_k] of the router
  const uint16_t* gate;  // [local experts, hidden, inner]
  const uint16_t* up;
  const uint16_t* down;         // [local experts, inner, hidden]
  const uint16_t* replay_gate;  // as gate, of the forward pass; null if it is the same, or if
  const uint16_t* replay_up;    // pre-activations of all rows are saved
  const int32_t* row_source;    // of the plan, likewise the next three
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
  Memory workspace;  // as large as `lay_out` says
};

// Returns what went wrong, or nothing. The device is prepared.
MOK_EXPORT std::string launch_backward_call(const BackwardCall& call, int32_t ordinal,
                                            cudaStream_t stream);

}  // namespace mok
