#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "core/mx.h"

// The codec of core/mx.h for kernels, by a few operations on floats a value. It has the same bits,
// but that NaN may have others, and that `mx_round` loses a zero's sign, which no sum of products
// shows that has another term.
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

// Half of what two elements are without a scale.
__device__ inline void unpack_halved(uint16_t packed, float* low, float* high) {
  constexpr uint32_t kHalves = 0x38003800;  // 0.5, twice
  asm("{\n"
      ".reg .b32 both;\n"
      ".reg .b16 first, second;\n"
      "cvt.rn.f16x2.e4m3x2 both, %2;\n"
      "mul.rn.f16x2 both, both, %3;\n"
      "mov.b32 {first, second}, both;\n"
      "cvt.f32.f16 %0, first;\n"
      "cvt.f32.f16 %1, second;\n"
      "}\n"
      : "=f"(*low), "=f"(*high)
      : "h"(packed), "r"(kHalves));
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
constexpr uint8_t kOne = 127;  // as a scale
inline void unpack_halved(uint16_t packed, float* low, float* high) {
  *low = float_of(mx_value(packed & 0xff, kOne)) * 0.5f;
  *high = float_of(mx_value(packed >> 8, kOne)) * 0.5f;
}
inline uint32_t pack_elements(float low, float high) {
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

// The largest finite magnitude of each block; values that are not finite become NaN.
template <int kBlocks, int kCount, typename OverLanes, typename AnyLane>
MOK_HOST_DEVICE inline void measure(float (&values)[kBlocks][kCount], const OverLanes& over_lanes,
                                    const AnyLane& any_lane, float (&largest)[kBlocks],
                                    bool* is_uncommon) {
  bool any = false;
  for (int b = 0; b < kBlocks; ++b) {
    largest[b] = over_lanes(largest_of(values[b]));
    any = any || !(largest[b] < kUncommon);
  }
  *is_uncommon = any_lane(any);
  if (*is_uncommon) [[unlikely]] {
    for (int b = 0; b < kBlocks; ++b) {
      for (float& value : values[b]) {
        value = fmaf(value, 0.0f, value);
      }
      const float finite = over_lanes(largest_of(values[b]));
      largest[b] = finite < float_of(kInfinity) ? finite : 0.0f;  // all are NaN
    }
  }
}

}  // namespace mx_detail

// A lane's share of blocks of 32. `over_lanes(number)` is the largest of those of the lanes that
// have the rest of a block, likewise a number rather than NaN; `any_lane(condition)` whether it
// holds in any of all lanes that call this together, which all get the same answer.
//
// Rounds the values to MXFP8. Several blocks at a time, since lanes wait for each other.
template <int kBlocks, int kCount, typename OverLanes, typename AnyLane>
MOK_HOST_DEVICE inline void mx_round(float (&values)[kBlocks][kCount], const OverLanes& over_lanes,
                                     const AnyLane& any_lane) {
  using namespace mx_detail;
  bool is_uncommon;
  float largest[kBlocks], up[kBlocks];
  measure(values, over_lanes, any_lane, largest, &is_uncommon);
  if (is_uncommon) [[unlikely]] {  // lest the sums below overflow
    for (int b = 0; b < kBlocks; ++b) {
      const bool is_large = largest[b] >= kUncommon;
      const float down = is_large ? 0x1p-64f : 1.0f;
      up[b] = is_large ? 0x1p64f : 1.0f;
      largest[b] *= down;
      for (float& value : values[b]) {
        value *= down;
      }
    }
  }
  // Next to 1.5 * 2^23 * step, floats are a step apart, and the sum is rounded to one of them. The
  // step is an eighth of the value's power of two, but no less than the least element; the block's
  // scale is its largest magnitude's power of two, as in `mx_scale`, over 2^8.
  constexpr uint32_t kToMagic = (20u << kMantissaBits) + 0x400000u;
  constexpr uint32_t kCarry = kMantissa - kLargestMantissa;
  constexpr int32_t kLeastScale = kLargestExponent << kMantissaBits;
  constexpr int32_t kToLeast = (kLargestExponent + kElementBias - 1) << kMantissaBits;
  for (int b = 0; b < kBlocks; ++b) {
    const auto scaled = static_cast<int32_t>((bits_of(largest[b]) + kCarry) & kInfinity);
    const int32_t least =
        (scaled > kLeastScale ? scaled : kLeastScale) - kToLeast + static_cast<int32_t>(kToMagic);
    for (float& value : values[b]) {
      const auto own = static_cast<int32_t>((bits_of(value) & kInfinity) + kToMagic);
      const float magic = float_of(static_cast<uint32_t>(own > least ? own : least));
      value = add_flushed(add_flushed(value, magic), -magic);
    }
  }
  if (is_uncommon) [[unlikely]] {
    for (int b = 0; b < kBlocks; ++b) {
      for (float& value : values[b]) {
        value *= up[b];
      }
    }
  }
}

// The block's scale and the values' elements, four a word. Values that are not finite become NaN.
template <int kCount, typename OverLanes, typename AnyLane>
MOK_HOST_DEVICE inline uint8_t mx_encode(float (&block)[1][kCount], const OverLanes& over_lanes,
                                         const AnyLane& any_lane,
                                         uint32_t (&elements)[kCount / 4]) {
  using namespace mx_detail;
  bool is_uncommon;
  float largest[1];
  measure(block, over_lanes, any_lane, largest, &is_uncommon);
  const uint8_t scale = mx_scale(bits_of(largest[0]));
  const float inverse = float_of(static_cast<uint32_t>(254 - scale) << kMantissaBits);
  for (int i = 0; i < kCount / 4; ++i) {
    const auto quotient = [&](int j) { return multiply_flushed(block[0][i * 4 + j], inverse); };
    elements[i] = pack_elements(quotient(0), quotient(1)) | pack_elements(quotient(2), quotient(3))
                                                                << 16;
  }
  return scale;
}

// The values of four elements, in bf16, two a word, with a scale that `mx_scale` gives.
MOK_HOST_DEVICE inline void mx_decode(uint32_t elements, uint8_t scale, uint32_t (&values)[2]) {
  using namespace mx_detail;
  // Twice the scale is a float that is not subnormal, whatever the scale.
  const float twice_scale = float_of(static_cast<uint32_t>(scale + 1) << kMantissaBits);
  for (int i = 0; i < 2; ++i) {
    float low, high;
    unpack_halved(static_cast<uint16_t>(elements >> 16 * i), &low, &high);
    values[i] = bits_of(multiply_flushed(low, twice_scale)) >> 16 |
                (bits_of(multiply_flushed(high, twice_scale)) & 0xffff0000u);
  }
}

}  // namespace mok
