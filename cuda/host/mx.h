#pragma once

#include <cstdint>

#include "core/mx.h"
#include "host/number.h"

namespace mok {

// Arrays [outer, length, inner] in MXFP8, blocks along `length`, which is a multiple of kMxBlock.
// Elements have the array's shape, scales [outer, length / kMxBlock, inner]; T is float or
// BFloat16.
struct MxShape {
  int64_t outer;
  int64_t length;
  int64_t inner;
};

template <typename T>
void mx_quantize(const T* values, MxShape shape, uint8_t* elements, uint8_t* scales);

template <typename T>
void mx_dequantize(const uint8_t* elements, const uint8_t* scales, MxShape shape, T* values);

}  // namespace mok
