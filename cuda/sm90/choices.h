#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// A number for each choice.
namespace mok::sm90 {

// out[i] = values[i], or 0 where slot_rank[i] says that the choice is masked; all [count].
cudaError_t copy_unmasked(const float* values, const int32_t* slot_rank, int64_t count, float* out,
                          cudaStream_t stream);

// Loads the kernel onto the current device.
cudaError_t load_choices();

}  // namespace mok::sm90
