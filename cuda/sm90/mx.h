#pragma once

#include <cuda_runtime_api.h>

#include "core/mx_lane.h"

// Arrays to MXFP8 (From float, or uint16_t for bfloat16; To uint8_t), from it (the reverse), or
// rounded to it (neither is uint8_t), with the bits of core/mx.h.
namespace mok::sm90 {

template <typename From, typename To>
cudaError_t convert_mx(const MxArrays<From, To>& arrays, cudaStream_t stream);

// Loads the kernels onto the current device.
cudaError_t load_mx();

}  // namespace mok::sm90
