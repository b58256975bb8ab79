#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// The end of combine: out[token] = sum over k, ascending, of weights[token, k] * slots[token, k],
// in f32 without fused multiply-adds, rounded to bf16; the bits of host/weighted_sum.h.
namespace mok::sm90 {

struct WeightedSumParams {
  const uint16_t* slots;     // [tokens, top_k, width]
  const int32_t* slot_rank;  // [tokens, top_k]; masked choices are skipped
  const float* weights;      // [tokens, top_k]
  uint16_t* out;             // [tokens, width]
  int64_t tokens;
  int32_t top_k;
  int32_t width;  // a multiple of 8
};

cudaError_t weighted_sum(const WeightedSumParams& params, cudaStream_t stream);

// Loads the kernel onto the current device.
cudaError_t load_weighted_sum();

}  // namespace mok::sm90
