#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// A number for each choice.
namespace mok::sm90 {

struct ChoicesParams {
  // Numbers in their home slots, [count]; or null, and they are pulled from where they lie on the
  // experts' ranks:
  const float* slots;
  const float* rows;        // [rows] of this rank, if it has no peers
  char* const* bases;       // [ranks] where each rank's arena begins; null without peers
  int64_t rows_offset;      // of a rank's rows in its arena
  const int32_t* slot_row;  // [count]

  const int32_t* slot_rank;  // [count]; masked choices get 0
  int64_t count;
  float* out;  // [count]
};

cudaError_t collect_choices(const ChoicesParams& params, cudaStream_t stream);

// Loads the kernel onto the current device.
cudaError_t load_choices();

}  // namespace mok::sm90
