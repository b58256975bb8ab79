#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// The end of combine: out[token] = sum over k, ascending, of weights[token, k] * the choice's row,
// in f32 without fused multiply-adds, rounded to bf16; the bits of host/weighted_sum.h.
namespace mok::sm90 {

struct WeightedSumParams {
  // Rows in their home slots, [tokens, top_k, width]; or null, and rows are pulled from where they
  // lie on the experts' ranks:
  const uint16_t* slots;
  const uint16_t* outputs;  // [rows, width] of this rank, if it has no peers
  char* const* bases;       // [ranks] where each rank's arena begins; null without peers
  int64_t outputs_offset;   // of a rank's outputs in its arena
  const int32_t* slot_row;  // [tokens, top_k]

  const int32_t* slot_rank;  // [tokens, top_k]; masked choices are skipped
  const float* weights;      // [tokens, top_k]; null: all are 1
  uint16_t* out;             // [tokens, width]
  int64_t tokens;
  int32_t top_k;
  int32_t width;  // a multiple of 8
};

cudaError_t weighted_sum(const WeightedSumParams& params, cudaStream_t stream);

// The same of rows in their home slots, [tokens, top_k, width] of any width, in T: float, or
// uint16_t for bf16.
template <typename T>
cudaError_t weighted_sum_of_slots(const T* slots, const int32_t* slot_rank, const float* weights,
                                  int64_t tokens, int64_t top_k, int64_t width, T* out,
                                  cudaStream_t stream);

// Loads the kernels onto the current device.
cudaError_t load_weighted_sum();

}  // namespace mok::sm90
