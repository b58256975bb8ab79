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

template <typename T>
T value_of(uint8_t element, uint8_t scale) {
  return from_float<T>(std::bit_cast<float>(mx_value(element, scale)));
}

// Fills the scales of each block's columns, where `scales_of(block)` points to, and calls
// take(place, element, scale) for all that is in it.
template <typename T, typename ScalesOf, typename Take>
void quantize_blocks(const T* values, MxShape shape, const ScalesOf& scales_of, const Take& take) {
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
    uint8_t* const scales = scales_of(block);
    std::transform(largest.begin(), largest.end(), scales, mx_scale);
    for (int64_t row = first; row < end; row += shape.inner) {
      for (int64_t i = 0; i < shape.inner; ++i) {
        take(row + i, mx_element(bits_of(values[row + i]), scales[i]), scales[i]);
      }
    }
  }
}

}  // namespace

template <typename T>
void mx_quantize(const T* values, MxShape shape, uint8_t* elements, uint8_t* scales) {
  quantize_blocks(
      values, shape, [&](int64_t block) { return scales + block * shape.inner; },
      [&](int64_t at, uint8_t element, uint8_t) { elements[at] = element; });
}

template <typename From, typename To>
void mx_round(const From* values, MxShape shape, To* rounded) {
  std::vector<uint8_t> scales(shape.inner);
  quantize_blocks(
      values, shape, [&](int64_t) { return scales.data(); },
      [&](int64_t at, uint8_t element, uint8_t scale) {
        rounded[at] = value_of<To>(element, scale);
      });
}

template <typename T>
void mx_dequantize(const uint8_t* elements, const uint8_t* scales, MxShape shape, T* values) {
  const int64_t blocks = shape.outer * (shape.length / kMxBlock);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * kMxBlock * shape.inner, end = first + kMxBlock * shape.inner;
    const uint8_t* const scale = scales + block * shape.inner;
    for (int64_t row = first; row < end; row += shape.inner) {
      for (int64_t i = 0; i < shape.inner; ++i) {
        values[row + i] = value_of<T>(elements[row + i], scale[i]);
      }
    }
  }
}

template void mx_quantize(const float*, MxShape, uint8_t*, uint8_t*);
template void mx_quantize(const BFloat16*, MxShape, uint8_t*, uint8_t*);
template void mx_dequantize(const uint8_t*, const uint8_t*, MxShape, float*);
template void mx_dequantize(const uint8_t*, const uint8_t*, MxShape, BFloat16*);
template void mx_round(const float*, MxShape, float*);
template void mx_round(const float*, MxShape, BFloat16*);
template void mx_round(const BFloat16*, MxShape, float*);
template void mx_round(const BFloat16*, MxShape, BFloat16*);

}  // namespace mok
