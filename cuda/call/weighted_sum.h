#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "call/export.h"

namespace mok {

// The weighted sum of rows in their home slots, for callers that fill them in another way.
struct WeightedSumCall {
  bool is_float32;           // slots and out; else they are bf16
  const void* slots;         // [tokens, top_k, width]
  const int32_t* slot_rank;  // [tokens, top_k]
  const float* weights;      // [tokens, top_k]
  int64_t tokens;
  int64_t top_k;
  int64_t width;
  void* out;  // [tokens, width]
};

// Returns what went wrong, or nothing.
MOK_EXPORT std::string launch_weighted_sum_call(const WeightedSumCall& call, cudaStream_t stream);

}  // namespace mok
