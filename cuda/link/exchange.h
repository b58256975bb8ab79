#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/call_record.h"
#include "core/plan.h"
#include "link/arena.h"
#include "link/arena_layout.h"

// The kernels by which ranks meet, before and after the big one. Only one block of them waits, with
// a bound, so they cannot keep a collective of another library from its SMs.
namespace mok {

// Each call has an entry and an exit, whether the entry is passed or not.
//
// A meeting ends when all ranks have come; everything that this rank's stream has done before is
// then visible to the others. If one has not come when the time-out expires, has failed in this
// call, or has come to a call of another signature, sets *failed and adds to the record: the call
// has no results on this rank. A call that has *failed or *kernel_failed set already waits for
// nobody, and fails on all ranks.
//
// Later calls are right again once every rank has come to as many; a rank that has left one out
// fails for ever, as do its peers. A rank that was waited for in vain is not waited for again until
// it has moved.
struct MeetingTerms {
  uint64_t signature;
  uint64_t timeout_ns;
  const int32_t* kernel_failed;
  int32_t* failed;
  CallRecord* record;
};

// Rows of this rank, [tokens, width] of bf16. In a layout of MXFP8 they are rounded, and what they
// are then goes to `rounded`, too, unless that is null.
struct ShownRows {
  const uint16_t* rows;
  uint16_t* rounded = nullptr;
};

// Pushes this rank's routes to all ranks, and shows them its tokens; or, if that is the layout's
// direction, pushes each token to the peers whose experts it has chosen, once to each. Then meets
// them at the call's entry. `x` may be null if the layout has no width.
cudaError_t publish_tokens(const Arena& arena, const PlanShape& plan, const int32_t* ids,
                           const ShownRows& x, const MeetingTerms& terms, cudaStream_t stream);

// Pushes this rank's router weights, [tokens, top_k], to all ranks, and shows them its tokens and
// the output's gradient, or pushes them; for a layout of a backward call. Then meets them at its
// entry. `slot_rank` is that of the plan.
cudaError_t publish_gradients(const Arena& arena, const PlanShape& plan, const float* weights,
                              const int32_t* slot_rank, const ShownRows& x, const ShownRows& dy,
                              const MeetingTerms& terms, cudaStream_t stream);

cudaError_t meet_at_exit(const Arena& arena, const MeetingTerms& terms, cudaStream_t stream);

// Loads the kernels onto the current device.
cudaError_t load_exchange();

}  // namespace mok
