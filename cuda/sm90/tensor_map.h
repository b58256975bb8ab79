#pragma once

#include <cuda.h>

#include <cstdint>

namespace mok::sm90 {

// A row-major matrix, read or written in boxes of `box_rows` x 128 bytes in the 128-byte swizzle.
// False if the driver refuses it.
template <typename Value>  // uint16_t for bf16, or float
bool encode_matrix(CUtensorMap* map, const Value* data, int64_t rows, int64_t columns,
                   int box_rows);

}  // namespace mok::sm90
