#pragma once

#include <cuda_runtime_api.h>

#include "core/plan.h"

// The plan on the device: the tables of host/plan_builder.h, bit for bit.
namespace mok::sm90 {

// int32 words of scratch memory that build_plan needs.
int64_t plan_scratch_words(const PlanShape& shape);

// Fills one rank's tables from the routes of all ranks, [ranks, tokens, top_k] on the device.
// `tables.pull_order` may be null.
cudaError_t build_plan(const PlanShape& shape, int32_t rank, const int32_t* routes,
                       const PlanTables& tables, int32_t* scratch, cudaStream_t stream);

// Whether the tables of so many experts fit the shared memory of a block.
bool plan_fits(const PlanShape& shape);

cudaError_t prepare_plan();

}  // namespace mok::sm90
