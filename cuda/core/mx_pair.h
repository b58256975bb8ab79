#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"

// The codec of core/mx.h two elements at a time, by the conversions that GPUs have. It has the same
// bits for whatever is finite:
// - A product by a power of two is exact, or subnormal. A quotient of a value and its scale that is
//   subnormal is far less than half of the least element; an element times its scale is a zero
//   then by definition. So both may be flushed, and so may subnormal values, which count as zeros.
// - No quotient is beyond 448, and the conversion rounds to the nearest element, ties to even.
// - An element is exact in float16 and float32; its product by its scale is in bfloat16, or beyond
//   the largest float, and then infinite.
// What is not finite is core/mx.h's: an infinity would become 448, and a NaN would lose its sign.
//
// On the host the conversions are those of the formats' definitions. tests/native/mx_lane_test.cc
// compares all of it with core/mx.h.
namespace mok {

struct MxPair {
  float low;
  float high;
};

// The powers of two that belong to a scale.
struct MxFactors {
  float inverse;  // 1 / scale
  float first;    // first * second is the scale; it may be no normal number,
  float second;   // which these are
};

// The scale is not NaN; `inverse` is one of scales that core/mx.h chooses, which are less than 248.
MOK_HOST_DEVICE inline MxFactors mx_factors(uint8_t scale);

// Two values' elements, the first one's in the lower byte.
MOK_HOST_DEVICE inline uint32_t mx_elements(MxPair values, float inverse_low, float inverse_high);

// Two elements' values.
MOK_HOST_DEVICE inline MxPair mx_values(uint32_t elements, const MxFactors& low,
                                        const MxFactors& high);

namespace mx_detail {

// Subnormal factors and products count as zeros with their sign.
MOK_HOST_DEVICE inline float multiply_flushing(float a, float b) {
#ifdef __CUDA_ARCH__
  float product;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
#else
  const auto flush = [](float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; };
  return flush(flush(a) * flush(b));
#endif
}

#ifndef __CUDA_ARCH__

// The nearest E4M3 of what is not beyond 448, of two equally near ones the even one.
inline uint32_t define_e4m3(float value) {
  const uint32_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fabs(value);
  const int exponent = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return sign | static_cast<uint32_t>(((exponent + 6) << 3) + steps);
}

inline float define_float(uint32_t element) {
  const int exponent = static_cast<int>(element >> 3 & 15),
            mantissa = static_cast<int>(element & 7);
  const float magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return element & 0x80 ? -magnitude : magnitude;
}

#endif

// Of numbers that are not beyond 448.
MOK_HOST_DEVICE inline uint32_t to_e4m3(MxPair numbers) {
#ifdef __CUDA_ARCH__
  uint16_t elements;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(elements)
      : "f"(numbers.high), "f"(numbers.low));
  return elements;
#else
  return define_e4m3(numbers.low) | define_e4m3(numbers.high) << 8;
#endif
}

MOK_HOST_DEVICE inline MxPair from_e4m3(uint32_t elements) {
#ifdef __CUDA_ARCH__
  MxPair numbers;
  asm("{\n"
      ".reg .f16 low, high;\n"
      ".reg .b32 both;\n"
      "cvt.rn.f16x2.e4m3x2 both, %2;\n"
      "mov.b32 {low, high}, both;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}\n"
      : "=f"(numbers.low), "=f"(numbers.high)
      : "h"(static_cast<uint16_t>(elements)));
  return numbers;
#else
  return {define_float(elements & 0xff), define_float(elements >> 8 & 0xff)};
#endif
}

}  // namespace mx_detail

MOK_HOST_DEVICE inline MxFactors mx_factors(uint8_t scale) {
  const auto power_of_two = [](int exponent) {
    return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
  };
  const int exponent = scale - 127, half = exponent / 2;
  return {power_of_two(-exponent), power_of_two(half), power_of_two(exponent - half)};
}

MOK_HOST_DEVICE inline uint32_t mx_elements(MxPair values, float inverse_low, float inverse_high) {
  return mx_detail::to_e4m3({mx_detail::multiply_flushing(values.low, inverse_low),
                             mx_detail::multiply_flushing(values.high, inverse_high)});
}

MOK_HOST_DEVICE inline MxPair mx_values(uint32_t elements, const MxFactors& low,
                                        const MxFactors& high) {
  using mx_detail::multiply_flushing;
  const MxPair numbers = mx_detail::from_e4m3(elements);
  return {multiply_flushing(multiply_flushing(numbers.low, low.first), low.second),
          multiply_flushing(multiply_flushing(numbers.high, high.first), high.second)};
}

}  // namespace mok
