#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "call/export.h"
#include "call/memory.h"
#include "core/plan.h"
#include "link/arena_layout.h"

// The calls that make a plan and nothing else.
namespace mok {

struct PlanCall {
  PlanShape shape;
  uint64_t timeout_ns;
  void* communicator;  // that of `prepare_peers`, for `plan_arena_layout`; null without peers
  const int32_t* ids;  // [tokens, top_k]
  Memory workspace;
  PlanTables tables;
};

// Of routes that the caller has gathered: there is nobody to meet.
struct GatheredPlanCall {
  PlanShape shape;
  const int32_t* ids;   // [ranks, tokens, top_k]
  const int32_t* rank;  // on the device, since one program is that of all ranks
  Memory workspace;
  PlanTables tables;
};

// Whether the tables of so many experts fit the shared memory of a block.
MOK_EXPORT bool plan_call_fits(const PlanShape& shape);

// Of the workspace that one call needs beside its operand and results.
MOK_EXPORT int64_t plan_workspace_bytes(const PlanShape& shape);

// Routes only.
MOK_EXPORT ArenaLayout plan_arena_layout(const PlanShape& shape);

// Both return what went wrong, or nothing, and need the device to be prepared.
MOK_EXPORT std::string launch_plan_call(const PlanCall& call, int32_t ordinal, cudaStream_t stream);
MOK_EXPORT std::string launch_gathered_plan_call(const GatheredPlanCall& call, int32_t ordinal,
                                                 cudaStream_t stream);

}  // namespace mok
