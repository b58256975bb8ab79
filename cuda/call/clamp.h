#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "sm90/forward.h"

namespace mok {

// The clamp and its neighbours among bf16 numbers, which are the f32 ones cut after 16 bits.
inline sm90::Clamp clamp_at(float limit) {
  if (std::isinf(limit)) {
    return {limit, limit, limit};
  }
  const uint32_t bits = std::bit_cast<uint32_t>(limit);
  const uint32_t below = (bits - 1) & 0xffff0000u;
  return {limit, std::bit_cast<float>(below), std::bit_cast<float>(below + 0x10000u)};
}

}  // namespace mok
