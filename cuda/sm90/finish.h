#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/call_record.h"

namespace mok::sm90 {

struct FinishParams {
  const int32_t* link_failed;  // words that are not zero if a wait has expired
  const int32_t* kernel_failed;
  const int32_t* counts;  // of the plan
  int32_t experts;
  struct Result {
    uint16_t* values;  // bf16, or the halves of f32
    int64_t count;
  };
  Result results[5];   // of the call; {} behind the last
  int32_t* kept_plan;  // expert_tile of a plan that is kept for a backward call, or null
  CallRecord* record;
};

// The last kernel of a call: a call in which a wait has expired has no results, so all of them
// become NaN, and a plan that is kept begins with kNoPlan; what happened is added to the record.
cudaError_t finish(const FinishParams& params, cudaStream_t stream);

// Loads the kernels onto the current device.
cudaError_t load_finish();

}  // namespace mok::sm90
