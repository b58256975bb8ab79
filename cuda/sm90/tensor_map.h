#pragma once

#include <cuda.h>

#include <cstdint>

namespace mok::sm90 {

// A row-major bf16 matrix, read or written in boxes of `box_rows` x 64 in the 128-byte swizzle.
// False if the driver refuses it.
bool encode_matrix(CUtensorMap* map, const void* data, int64_t rows, int64_t columns, int box_rows);

}  // namespace mok::sm90
