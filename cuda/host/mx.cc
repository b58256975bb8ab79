#include "host/mx.h"

#include <algorithm>
#include <bit>
#include <vector>

namespace mok {
namespace {

template <typename T>
uint32_t bits_of(T value) {
  return std::bit_cast<uint32_t>(to_float(value));
}

}  // namespace

template <typename T>
void mx_quantize(const T* values, MxShape shape, uint8_t* elements, uint8_t* scales) {
  std::vector<uint32_t> largest(shape.inner);
  const int64_t blocks = shape.outer * (shape.length / kMxBlock);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * kMxBlock * shape.inner, end = first + kMxBlock * shape.inner;
    std::fill(largest.begin(), largest.end(), 0);
    for (int64_t row = first; row < end; row += shape.inner) {
      for (int64_t i = 0; i < shape.inner; ++i) {
        largest[i] = std::max(largest[i], mx_magnitude(bits_of(values[row + i])));
      }
    }
    uint8_t* const scale = scales + block * shape.inner;
    std::transform(largest.begin(), largest.end(), scale, mx_scale);
    for (int64_t row = first; row < end; row += shape.inner) {
      for (int64_t i = 0; i < shape.inner; ++i) {
        elements[row + i] = mx_element(bits_of(values[row + i]), scale[i]);
      }
    }
  }
}

template <typename T>
void mx_dequantize(const uint8_t* elements, const uint8_t* scales, MxShape shape, T* values) {
  const int64_t blocks = shape.outer * (shape.length / kMxBlock);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * kMxBlock * shape.inner, end = first + kMxBlock * shape.inner;
    const uint8_t* const scale = scales + block * shape.inner;
    for (int64_t row = first; row < end; row += shape.inner) {
      for (int64_t i = 0; i < shape.inner; ++i) {
        values[row + i] =
            from_float<T>(std::bit_cast<float>(mx_value(elements[row + i], scale[i])));
      }
    }
  }
}

template void mx_quantize(const float*, MxShape, uint8_t*, uint8_t*);
template void mx_quantize(const BFloat16*, MxShape, uint8_t*, uint8_t*);
template void mx_dequantize(const uint8_t*, const uint8_t*, MxShape, float*);
template void mx_dequantize(const uint8_t*, const uint8_t*, MxShape, BFloat16*);

}  // namespace mok
