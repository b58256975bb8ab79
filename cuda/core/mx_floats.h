#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "core/mx.h"

// The codec of core/mx.h for kernels, by a few operations on floats a value. It has the same bits,
// but that `mx_round` loses a zero's sign, which no sum of products shows that has another term.
namespace mok {

namespace mx_detail {

#ifdef __CUDA_ARCH__
__device__ inline float float_of(uint32_t bits) { return __uint_as_float(bits); }
__device__ inline uint32_t bits_of(float value) { return __float_as_uint(value); }

// Of a number and a NaN the number.
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }

// Subnormal operands and results count as zeros.
__device__ inline float add_flushed(float a, float b) {
  float sum;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}
__device__ inline float multiply_flushed(float a, float b) {
  float product;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

// The elements nearest to two numbers of at most 448, the first one in the lower byte.
__device__ inline uint32_t pack_elements(float low, float high) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}
#else
inline float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
inline float larger(float a, float b) { return a < b || a != a ? b : a; }
inline float flushed(float value) {
  return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value;
}
inline float add_flushed(float a, float b) { return flushed(flushed(a) + flushed(b)); }
inline float multiply_flushed(float a, float b) { return flushed(flushed(a) * flushed(b)); }
inline uint32_t pack_elements(float low, float high) {
  constexpr uint8_t kOne = 127;  // as a scale
  return mx_element(bits_of(low), kOne) | static_cast<uint32_t>(mx_element(bits_of(high), kOne))
                                              << 8;
}
#endif

// Blocks with larger magnitudes, or with infinities, take more steps.
constexpr float kUncommon = 0x1p107f;

template <int kCount>
MOK_HOST_DEVICE inline float largest_of(const float (&values)[kCount]) {
  float largest = fabsf(values[0]);
  for (int i = 1; i < kCount; ++i) {
    largest = larger(largest, fabsf(values[i]));
  }
  return largest;
}

// The largest finite magnitude of a block; values that are not finite become NaN.
template <int kCount, typename OverLanes, typename AnyLane>
MOK_HOST_DEVICE inline float measure(float (&values)[kCount], const OverLanes& over_lanes,
                                     const AnyLane& any_lane, bool* is_uncommon) {
  float largest = over_lanes(largest_of(values));
  *is_uncommon = any_lane(!(largest < kUncommon));
  if (*is_uncommon) {
    for (float& value : values) {
      value = fmaf(value, 0.0f, value);
    }
    largest = over_lanes(largest_of(values));
    largest = largest < float_of(kInfinity) ? largest : 0.0f;  // all are NaN
  }
  return largest;
}

}  // namespace mx_detail

// A lane's share of a block of 32. `over_lanes(number)` is the largest of those of the lanes that
// have the rest, likewise a number rather than NaN; `any_lane(condition)` whether it holds in any
// of all lanes that call this together, which all get the same answer.
//
// Rounds the values to MXFP8.
template <int kCount, typename OverLanes, typename AnyLane>
MOK_HOST_DEVICE inline void mx_round(float (&values)[kCount], const OverLanes& over_lanes,
                                     const AnyLane& any_lane) {
  using namespace mx_detail;
  bool is_uncommon;
  float largest = measure(values, over_lanes, any_lane, &is_uncommon);
  float up = 1.0f;
  if (is_uncommon) {  // lest the sums below overflow
    const bool is_large = largest >= kUncommon;
    const float down = is_large ? 0x1p-64f : 1.0f;
    up = is_large ? 0x1p64f : 1.0f;
    largest *= down;
    for (float& value : values) {
      value *= down;
    }
  }
  // Next to 1.5 * 2^23 * step, floats are a step apart, and the sum is rounded to one of them. The
  // step is an eighth of the value's power of two, but no less than the least element; the block's
  // scale is its largest magnitude's power of two, as in `mx_scale`, over 2^8.
  constexpr uint32_t kToMagic = (20u << kMantissaBits) + 0x400000u;
  constexpr uint32_t kCarry = kMantissa - kLargestMantissa;
  constexpr int32_t kLeastScale = kLargestExponent << kMantissaBits;
  constexpr int32_t kToLeast = (kLargestExponent + kElementBias - 1) << kMantissaBits;
  const auto scaled = static_cast<int32_t>((bits_of(largest) + kCarry) & kInfinity);
  const int32_t least =
      (scaled > kLeastScale ? scaled : kLeastScale) - kToLeast + static_cast<int32_t>(kToMagic);
  for (float& value : values) {
    const auto own = static_cast<int32_t>((bits_of(value) & kInfinity) + kToMagic);
    const float magic = float_of(static_cast<uint32_t>(own > least ? own : least));
    value = add_flushed(add_flushed(value, magic), -magic);
  }
  if (is_uncommon) {
    for (float& value : values) {
      value *= up;
    }
  }
}

// The block's scale and the values' elements, four a word. Values that are not finite become NaN.
template <int kCount, typename OverLanes, typename AnyLane>
MOK_HOST_DEVICE inline uint8_t mx_encode(float (&values)[kCount], const OverLanes& over_lanes,
                                         const AnyLane& any_lane,
                                         uint32_t (&elements)[kCount / 4]) {
  using namespace mx_detail;
  bool is_uncommon;
  const uint8_t scale = mx_scale(bits_of(measure(values, over_lanes, any_lane, &is_uncommon)));
  const float inverse = float_of(static_cast<uint32_t>(254 - scale) << kMantissaBits);
  for (int i = 0; i < kCount / 4; ++i) {
    const auto quotient = [&](int j) { return multiply_flushed(values[i * 4 + j], inverse); };
    elements[i] = pack_elements(quotient(0), quotient(1)) | pack_elements(quotient(2), quotient(3))
                                                                << 16;
  }
  return scale;
}

// The values of four elements, in bf16, two a word, with a scale that `mx_scale` gives.
MOK_HOST_DEVICE inline void mx_decode(uint32_t elements, uint8_t scale, uint32_t (&values)[2]) {
  using namespace mx_detail;
  constexpr uint32_t kOfEach = 0x01010101u;
  const bool any_nan = (((elements & kMxNanElement * kOfEach) + kOfEach) & 0x80 * kOfEach) != 0;
  // The bits as they are make a number 2^-119 as large as half the element, which is a float even
  // if it is subnormal; twice the scale is then a float for every scale.
  const float twice_scale = float_of(static_cast<uint32_t>(scale + 1) << kMantissaBits);
  const auto value_of = [&](int i) {
    const uint32_t at_top = elements << (24 - 8 * i);
    if (any_nan) return mx_value(static_cast<uint8_t>(at_top >> 24), scale);
    const auto shifted = static_cast<uint32_t>(static_cast<int32_t>(at_top) >> 4);
    return bits_of(multiply_flushed(float_of(shifted & 0x87f00000u) * 0x1p119f, twice_scale));
  };
  for (int i = 0; i < 2; ++i) {
    values[i] = value_of(2 * i) >> 16 | (value_of(2 * i + 1) & 0xffff0000u);
  }
}

}  // namespace mok
