#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mok::sm90 {

// Rows of bf16, [rows, width], as MXFP8 has them, with blocks along the rows.
cudaError_t round_rows(const uint16_t* from, uint16_t* to, int64_t rows, int32_t width,
                       cudaStream_t stream);

// Loads the kernel onto the current device.
cudaError_t load_round_rows();

}  // namespace mok::sm90
