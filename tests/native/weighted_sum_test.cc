// The weighted sum of slots, and the rounding to bfloat16 in it, against their definitions: the
// bits of every sum, for random numbers, subnormals, infinities and NaN.
//
// links: host/weighted_sum.cc
#include "host/weighted_sum.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "core/plan.h"
#include "host/number.h"
#include "require.h"

using namespace mok;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float any_float(std::mt19937& rng) { return std::bit_cast<float>(static_cast<uint32_t>(rng())); }

// The nearest bfloat16 among the two around a finite value, the even one of two equally near.
// Beyond the largest the next one counts as 2^128, and is infinite.
uint16_t define_rounding(float value) {
  const uint16_t below = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  const uint16_t above = below + 1;
  const auto magnitude = [](uint16_t bits) {
    const float exact = std::fabs(to_float(BFloat16{bits}));
    return std::isinf(exact) ? std::ldexp(1.0, 128) : static_cast<double>(exact);
  };
  const double to_below = std::fabs(double{value}) - magnitude(below);
  const double to_above = magnitude(above) - std::fabs(double{value});
  if (to_below == to_above) return below % 2 == 0 ? below : above;
  return to_below < to_above ? below : above;
}

void check_rounding(std::mt19937& rng) {
  for (int trial = 0; trial < 1000000; ++trial) {
    float value = any_float(rng);
    if (trial % 4 == 0) {  // half-way between two
      value = std::bit_cast<float>((std::bit_cast<uint32_t>(value) & 0xffff0000u) | 0x8000u);
    }
    const uint16_t bits = from_float<BFloat16>(value).bits;
    if (std::isnan(value)) {
      REQUIRE(std::isnan(to_float(BFloat16{bits})) && (bits & 0x40));
    } else if (std::isinf(value)) {
      REQUIRE(to_float(BFloat16{bits}) == value);
    } else {
      REQUIRE(bits == define_rounding(value));
    }
  }
}

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
uint32_t bits_of(BFloat16 value) { return value.bits; }

bool is_nan(float value) { return std::isnan(value); }
bool is_nan(BFloat16 value) { return std::isnan(to_float(value)); }

template <typename T>
void check_sums(std::mt19937& rng) {
  std::normal_distribution<float> normal;
  int sums = 0, nans = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const int64_t tokens = rng() % 12, top_k = 1 + rng() % 9, width = 1 + rng() % 40;
    const bool is_wild = rng() % 3 == 0;
    const auto draw = [&] { return is_wild ? any_float(rng) : normal(rng); };
    std::vector<T> slots(tokens * top_k * width), out(tokens * width, from_float<T>(kInfinity));
    std::vector<int32_t> slot_rank(tokens * top_k);
    std::vector<float> weights(tokens * top_k);
    for (T& value : slots) value = from_float<T>(draw());
    for (int32_t& rank : slot_rank) rank = rng() % 3 ? static_cast<int32_t>(rng()) : kMaskedChoice;
    for (float& weight : weights) weight = draw();
    weighted_sum(slots.data(), slot_rank.data(), weights.data(), tokens, top_k, width, out.data());
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t column = 0; column < width; ++column) {
        volatile float sum = 0.0f;  // stored at each step: neither reordered nor contracted
        for (int64_t choice = token * top_k; choice < (token + 1) * top_k; ++choice) {
          if (slot_rank[choice] == kMaskedChoice) continue;
          const volatile float term = weights[choice] * to_float(slots[choice * width + column]);
          sum = sum + term;
        }
        const T expected = from_float<T>(sum), got = out[token * width + column];
        REQUIRE(is_nan(expected) ? is_nan(got) : bits_of(got) == bits_of(expected));
        ++sums;
        nans += is_nan(expected);
      }
    }
  }
  REQUIRE(sums > 100000 && nans > 1000 && nans < sums / 2);
}

}  // namespace

int main() {
  std::mt19937 rng(9);
  check_rounding(rng);
  check_sums<float>(rng);
  check_sums<BFloat16>(rng);
  std::puts("weighted sums good");
}
