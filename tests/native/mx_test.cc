// The MXFP8 codec against its definition in doubles: every element with every scale, the scale of
// every magnitude's neighbourhood, and elements of random numbers, ties, subnormals, infinities and
// NaN; then arrays with blocks along any of their axes.
//
// links: host/mx.cc
#include "host/mx.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "core/mx.h"
#include "host/number.h"
#include "require.h"

using namespace mok;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLeastNormal = 0x1p-126;

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

// |element| of a code that is no NaN, from the format's definition.
double define_element(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  return exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
}

double define_scale(int code) { return std::ldexp(1.0, code - 127); }

void check_every_element_with_every_scale() {
  for (int scale = 0; scale < 256; ++scale) {
    for (int element = 0; element < 256; ++element) {
      const uint32_t bits = mx_value(element, scale);
      REQUIRE((bits & 0xffff) == 0);
      const float value = float_of(bits);
      const int magnitude = element & 0x7f;
      if (scale == 255 || magnitude == 0x7f) {
        REQUIRE(bits == 0x7fc00000);
        continue;
      }
      double exact = define_element(magnitude) * define_scale(scale);
      if (exact < kLeastNormal) exact = 0;
      REQUIRE(std::fabs(value) == (exact < 0x1p128 ? exact : kInfinity));
      REQUIRE(std::signbit(value) == (element > 0x7f));
    }
  }
}

// The nearest code to |value| / scale, the even one of two equally near.
int define_rounding(float value, int scale) {
  const double magnitude = std::fabs(double{value});
  if (magnitude < kLeastNormal) return 0;
  const double quotient = magnitude / define_scale(scale);
  int best = 0;
  for (int code = 1; code < 0x7f; ++code) {
    const double nearer =
        std::fabs(quotient - define_element(best)) - std::fabs(quotient - define_element(code));
    if (nearer > 0 || (nearer == 0 && code % 2 == 0)) best = code;
  }
  return best;
}

void check_element(float value, int scale) {
  const int want = std::isfinite(value) ? define_rounding(value, scale) : 0x7f;
  REQUIRE(mx_element(bits_of(value), scale) == (want | (std::signbit(value) ? 0x80 : 0)));
}

// The least scale with which nothing is beyond 448.
int define_scale_of(float largest) {
  int scale = 0;
  while (largest > 448 * define_scale(scale)) ++scale;
  return scale;
}

void check_scales() {
  for (int exponent = 0; exponent < 255; ++exponent) {
    for (const uint32_t mantissa : {0u, 1u, 0x5fffffu, 0x600000u, 0x600001u, 0x7fffffu}) {
      const uint32_t largest = static_cast<uint32_t>(exponent) << 23 | mantissa;
      REQUIRE(mx_magnitude(largest) == largest && mx_magnitude(largest | 0x80000000) == largest);
      REQUIRE(mx_scale(largest) == define_scale_of(float_of(largest)));
    }
  }
  for (const uint32_t not_finite : {0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u}) {
    REQUIRE(mx_magnitude(not_finite) == 0);
  }
}

void check_elements(std::mt19937& rng) {
  for (int scale = 0; scale < 248; ++scale) {
    for (int code = 0; code < 0x7f; ++code) {  // codes, ties and their neighbours
      const double low = define_element(code), high = define_element(std::min(code + 1, 0x7e));
      for (const double quotient : {low, (low + high) / 2}) {
        const float value = static_cast<float>(quotient * define_scale(scale));
        for (const float near : {value, std::nextafter(value, 0.0f),
                                 std::min(std::nextafter(value, kInfinity),
                                          static_cast<float>(448 * define_scale(scale)))}) {
          check_element(near, scale);
          check_element(-near, scale);
        }
      }
    }
  }
  for (int trial = 0; trial < 200000; ++trial) {
    const float value = float_of(rng());
    const int least = std::isfinite(value) ? define_scale_of(std::fabs(value)) : 0;
    check_element(value, std::min<int>(least + rng() % 20, 247));
  }
  for (const float value : {0.0f, -0.0f, 1e-40f, -1e-45f, kInfinity, -kInfinity, float(NAN)}) {
    for (const int scale : {0, 1, 127, 247}) check_element(value, scale);
  }
}

template <typename T>
void check_arrays(std::mt19937& rng) {
  for (const MxShape shape : {MxShape{3, 64, 1}, MxShape{1, 96, 5}, MxShape{2, 32, 33}}) {
    const int64_t count = shape.outer * shape.length * shape.inner;
    std::vector<T> values(count), back(count);
    for (T& value : values) value = from_float<T>(float_of(rng()));
    std::vector<uint8_t> elements(count), scales(count / kMxBlock);
    mx_quantize(values.data(), shape, elements.data(), scales.data());
    mx_dequantize(elements.data(), scales.data(), shape, back.data());
    const auto scale_of = [&](int64_t o, int64_t l, int64_t i) -> uint8_t& {
      return scales[(o * (shape.length / kMxBlock) + l / kMxBlock) * shape.inner + i];
    };
    for (int64_t at = 0; at < count; ++at) {
      const int64_t i = at % shape.inner, l = at / shape.inner % shape.length;
      const int64_t o = at / shape.inner / shape.length;
      uint32_t largest = 0;
      for (int64_t row = l - l % kMxBlock; row < l - l % kMxBlock + kMxBlock; ++row) {
        const T value = values[(o * shape.length + row) * shape.inner + i];
        largest = std::max(largest, mx_magnitude(bits_of(to_float(value))));
      }
      REQUIRE(scale_of(o, l, i) == mx_scale(largest));
      REQUIRE(elements[at] == mx_element(bits_of(to_float(values[at])), scale_of(o, l, i)));
      REQUIRE(bits_of(to_float(back[at])) == mx_value(elements[at], scale_of(o, l, i)));
    }
  }
}

}  // namespace

int main() {
  std::mt19937 rng(1);
  check_every_element_with_every_scale();
  check_scales();
  check_elements(rng);
  check_arrays<float>(rng);
  check_arrays<BFloat16>(rng);
}
