#pragma once

#include <cstdint>

#include "core/host_device.h"

// OCP MXFP8 ("OCP Microscaling Formats (MX) Specification", version 1.0): blocks of 32 elements
// E4M3 (bias 7, no infinities, at most 448) that share a scale E8M0, a biased exponent of which 255
// is NaN. The specification leaves the scale's choice open; here it is the least with which no
// element of the block is beyond 448, and 2^-127 for a block of zeros.
//
// Floats are given and taken as their bits, and nothing but integers is computed, so that neither
// contraction nor flushing of subnormals can change a result. Subnormal floats count as zeros and
// none is ever made. What is not finite becomes an element NaN, and has no part in the scale.
// jax_mok/quantize.py has the same bits.
namespace mok {

constexpr int kMxBlock = 32;
constexpr uint8_t kMxNanScale = 255;
constexpr uint8_t kMxNanElement = 0x7f;  // of either sign

// Of a row with blocks along it: its elements, then its scales, up to a multiple of 16 bytes.
MOK_HOST_DEVICE inline int64_t mx_row_bytes(int64_t width) {
  return (width + width / kMxBlock + 15) / 16 * 16;
}

namespace mx_detail {

constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kQuietNan = 0x7fc00000;
constexpr uint32_t kMantissa = 0x007fffff;
constexpr int kMantissaBits = 23;
constexpr int kElementMantissaBits = 3;
constexpr int kElementBias = 7;
constexpr int kLargestExponent = 8;              // 448 is 1.75 * 2^8,
constexpr uint32_t kLargestMantissa = 0x600000;  // whose mantissa as a float's this is

}  // namespace mx_detail

// What a float contributes to `largest` of its block: magnitudes are ordered as their bits are.
MOK_HOST_DEVICE inline uint32_t mx_magnitude(uint32_t value) {
  const uint32_t magnitude = value & 0x7fffffff;
  return magnitude < mx_detail::kInfinity ? magnitude : 0;
}

// The scale of a block with this largest magnitude.
MOK_HOST_DEVICE inline uint8_t mx_scale(uint32_t largest) {
  using namespace mx_detail;
  const int exponent = static_cast<int>(largest >> kMantissaBits) - kLargestExponent +
                       ((largest & kMantissa) > kLargestMantissa ? 1 : 0);
  return static_cast<uint8_t>(exponent < 0 ? 0 : exponent);
}

// The element nearest to value / scale, of two equally near ones the even one. The scale is that of
// the value's block, or a larger one.
MOK_HOST_DEVICE inline uint8_t mx_element(uint32_t value, uint8_t scale) {
  using namespace mx_detail;
  const uint8_t sign = static_cast<uint8_t>(value >> 24 & 0x80);
  const uint32_t magnitude = value & 0x7fffffff;
  if (magnitude >= kInfinity) return sign | kMxNanElement;
  if (magnitude <= kMantissa) return sign;
  // The quotient is mantissa * 2^(exponent - 23).
  const int exponent = static_cast<int>(magnitude >> kMantissaBits) - scale;
  const uint32_t mantissa = (magnitude & kMantissa) | (kMantissa + 1);
  constexpr int kLeastExponent = 1 - kElementBias;  // below it all steps are equal
  const int step_exponent = exponent < kLeastExponent ? kLeastExponent : exponent;
  const int shift = kMantissaBits - kElementMantissaBits + step_exponent - exponent;
  if (shift > kMantissaBits + 1) return sign;  // less than half a step
  const uint32_t half_or_less = (1u << (shift - 1)) - 1 + (mantissa >> shift & 1);
  const uint32_t steps = (mantissa + half_or_less) >> shift;
  // Codes go on from one exponent to the next, so a carry needs no care.
  const uint32_t first = static_cast<uint32_t>(step_exponent - kLeastExponent);
  return static_cast<uint8_t>(sign | ((first << kElementMantissaBits) + steps));
}

// element * scale: exact, and its lower 16 bits are zeros, so that its upper ones are the bfloat16.
// Zero, with its sign, if it is less than 2^-126; infinite if it is beyond the largest float.
MOK_HOST_DEVICE inline uint32_t mx_value(uint8_t element, uint8_t scale) {
  using namespace mx_detail;
  const uint32_t magnitude = element & 0x7f;
  if (scale == kMxNanScale || magnitude == kMxNanElement) return kQuietNan;
  const uint32_t sign = static_cast<uint32_t>(element & 0x80) << 24;
  int exponent = static_cast<int>(magnitude >> kElementMantissaBits) - kElementBias + scale;
  uint32_t mantissa = magnitude & 7;
  if (magnitude < 8) {
    if (magnitude == 0) return sign;
    const int up = magnitude < 2 ? 3 : magnitude < 4 ? 2 : 1;  // to a leading one
    exponent += 1 - up;
    mantissa = magnitude << up & 7;
  }
  if (exponent <= 0) return sign;
  if (exponent >= 255) return sign | kInfinity;
  return sign | static_cast<uint32_t>(exponent) << kMantissaBits |
         mantissa << (kMantissaBits - kElementMantissaBits);
}

}  // namespace mok
