// The kernels' rounding to MXFP8 against the codec: every element with every scale decoded, and
// blocks of all magnitudes encoded and rounded, cut among lanes in both ways that kernels cut them.
#include "core/mx_floats.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "core/mx.h"
#include "require.h"

using namespace mok;

namespace {

using Block = std::array<float, kMxBlock>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

void check_every_element_with_every_scale() {
  for (int scale = 0; scale < 248; ++scale) {
    for (uint32_t element = 0; element < 256; ++element) {
      const uint32_t others = element * 0x9e3779b9u;
      for (int place = 0; place < 4; ++place) {
        const uint32_t four = (others & ~(0xffu << 8 * place)) | element << 8 * place;
        uint32_t values[2];
        mx_decode(four, scale, values);
        for (int i = 0; i < 4; ++i) {
          const uint32_t want = mx_value(four >> 8 * i & 0xff, scale) >> 16;
          const uint32_t got = values[i / 2] >> 16 * (i % 2) & 0xffff;
          REQUIRE(got == want || ((want & 0x7fff) > 0x7f80 && (got & 0x7fff) > 0x7f80));
        }
      }
    }
  }
}

uint8_t scale_of(const Block& block) {
  uint32_t largest = 0;
  for (const float value : block) largest = std::max(largest, mx_magnitude(bits_of(value)));
  return mx_scale(largest);
}

// The whole block as one lane's.
const auto alone = [](float largest) { return largest; };
const auto own = [](bool condition) { return condition; };

// Eight values of it as one of four lanes that measure together; `others` is of the three others.
template <typename Round>
void as_lane_of_four(const Block& block, int lane, const Round& round) {
  float values[1][8], rest[24], common[24];
  for (int i = 0, at = 0; i < kMxBlock; ++i) {
    (i / 8 == lane ? values[0][i % 8] : rest[at++]) = block[i];
  }
  for (int i = 0; i < 24; ++i) common[i] = std::fmaf(rest[i], 0.0f, rest[i]);
  int calls = 0;
  const auto over_lanes = [&](float largest) {
    const float others = mx_detail::largest_of(calls++ == 0 ? rest : common);
    return mx_detail::larger(largest, others);
  };
  round(values, over_lanes);
}

void require_same(float got, uint8_t element, uint8_t scale) {
  const uint32_t want = mx_value(element, scale);
  if (std::isnan(float_of(want))) {
    REQUIRE(std::isnan(got));
  } else {
    REQUIRE(got == float_of(want));
  }
}

void check(const Block& block) {
  const uint8_t scale = scale_of(block);
  const auto element_of = [&](int i) { return mx_element(bits_of(block[i]), scale); };

  // With a block that is as it is, whatever the other one is.
  float values[2][kMxBlock] = {};
  std::copy(block.begin(), block.end(), values[1]);
  values[0][5] = 384;
  mx_round(values, alone, own);
  for (int i = 0; i < kMxBlock; ++i) {
    require_same(values[1][i], element_of(i), scale);
    REQUIRE(values[0][i] == (i == 5 ? 384 : 0));
  }

  uint32_t words[kMxBlock / 4];
  float single[1][kMxBlock];
  std::copy(block.begin(), block.end(), single[0]);
  REQUIRE(mx_encode(single, alone, own, words) == scale);
  const auto code_of = [&](uint32_t word, int i) { return word >> 8 * (i % 4) & 0xff; };
  const auto require_code = [&](uint32_t code, int i) {
    // A NaN has no sign.
    const uint32_t want = element_of(i);
    REQUIRE(code == want || ((want & 0x7f) == 0x7f && (code & 0x7f) == 0x7f));
  };
  for (int i = 0; i < kMxBlock; ++i) require_code(code_of(words[i / 4], i), i);

  for (int lane = 0; lane < 4; ++lane) {
    as_lane_of_four(block, lane, [&](auto& eight, const auto& over_lanes) {
      mx_round(eight, over_lanes, own);
      for (int i = 0; i < 8; ++i) require_same(eight[0][i], element_of(lane * 8 + i), scale);
    });
    as_lane_of_four(block, lane, [&](auto& eight, const auto& over_lanes) {
      uint32_t two[2];
      REQUIRE(mx_encode(eight, over_lanes, own, two) == scale);
      for (int i = 0; i < 8; ++i) require_code(code_of(two[i / 4], i), lane * 8 + i);
    });
  }
}

// Codes, ties and their neighbours in a block whose largest magnitude asks for this scale.
void check_ties(std::mt19937& rng) {
  for (int scale = 0; scale < 248; ++scale) {
    const double unit = std::ldexp(1.0, scale - 127);
    for (int first = 0; first < 0x7e; first += 5) {
      Block block{};
      block[0] =
          static_cast<float>(std::min(448 * unit, double{std::numeric_limits<float>::max()}));
      for (int i = 1; i < kMxBlock; ++i) {
        const int code = std::min(first + i / 6, 0x7d);
        const double low = float_of(mx_value(code, 127)), high = float_of(mx_value(code + 1, 127));
        const double quotient = i % 2 == 0 ? low : (low + high) / 2;
        const auto value = static_cast<float>(quotient * unit);
        const float near[3] = {value, std::nextafter(value, 0.0f),
                               std::nextafter(value, kInfinity)};
        block[i] = std::min(near[i / 2 % 3], block[0]) * (rng() % 2 == 0 ? 1.0f : -1.0f);
      }
      check(block);
    }
  }
}

void check_random(std::mt19937& rng) {
  std::normal_distribution<float> normal;
  const float specials[] = {0.0f, -0.0f, 1e-40f, -1e-45f, kInfinity, -kInfinity, NAN, -NAN};
  for (int trial = 0; trial < 60000; ++trial) {
    Block block;
    const int exponent = static_cast<int>(rng() % 300) - 160;
    const bool any_bits = trial % 4 == 0;
    for (float& value : block) {
      value = any_bits ? float_of(rng()) : std::ldexp(normal(rng), exponent - rng() % 12);
    }
    for (uint32_t count = trial % 3 == 0 ? rng() % 4 : 0; count > 0; --count) {
      block[rng() % kMxBlock] = specials[rng() % std::size(specials)];
    }
    check(block);
  }
  for (const float value : specials) {
    Block block;
    block.fill(value);
    check(block);
  }
}

}  // namespace

int main() {
  std::mt19937 rng(1);
  check_every_element_with_every_scale();
  check_ties(rng);
  check_random(rng);
}
