#pragma once

#include <cuda_runtime_api.h>

#include "core/plan.h"

// The plan on the device: the tables of host/plan_builder.h, bit for bit.
namespace mok::sm90 {

// int32 words of scratch memory that build_plan needs.
int64_t plan_scratch_words(const PlanShape& shape);

// What the plan is made of, and what it needs beside its tables; all on the device.
struct PlanSource {
  const int32_t* routes;  // [ranks, tokens, top_k] of all ranks
  // Where to take a copy of the routes, if not null (it may be themselves), of masked choices alone
  // if *failed: whatever a late rank may do to the arena, the kernels of a call see one set of
  // routes, and a rank that has not passed the entry pushes nothing.
  int32_t* copy = nullptr;
  const int32_t* failed = nullptr;
  int32_t* scratch;   // [plan_scratch_words]
  uint64_t* to_pull;  // [max_rows / 64], zero before: sets bit r of word t if row 64 t + r is the
                      // first that needs its token, a peer's; may be null
  const int32_t* rank = nullptr;  // if not null, read when the kernels run, instead of an argument
};

// Fills the tables of one rank: `rank`, or what `source.rank` points to. `tables.pull_order` may be
// null.
cudaError_t build_plan(const PlanShape& shape, int32_t rank, const PlanSource& source,
                       const PlanTables& tables, cudaStream_t stream);

// Whether the tables of so many experts fit the shared memory of a block.
bool plan_fits(const PlanShape& shape);

cudaError_t prepare_plan();

}  // namespace mok::sm90
