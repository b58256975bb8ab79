#pragma once

#include <bit>
#include <cstdint>

// Numbers whose bits must not depend on a compiler's choices. Files that include this header are
// compiled without contraction of a product and a sum into a fused multiply-add.
namespace mok {

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

template <typename T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

// Rounds to nearest, ties to even; a NaN stays a quiet NaN.
template <>
inline BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (value != value) {
    return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  }
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

}  // namespace mok
