// What the lanes of the GPU kernels do with MXFP8, run for every lane of every warp on the host,
// against core/mx.h alone; and the codec of pairs against core/mx.h: every element with every
// scale, every bfloat16 with every scale that fits it, and both sides of every step of rounding.
//
// links: host/mx.cc
#include "core/mx_lane.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "core/mx.h"
#include "core/mx_pair.h"
#include "host/mx.h"
#include "host/number.h"
#include "require.h"

using namespace mok;

namespace {

constexpr int kScales = 248;  // 0 up to the one of the largest float

float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

uint32_t pair_element(uint32_t value, int scale) {
  const float inverse = mx_factors(scale).inverse;
  const uint32_t elements = mx_elements({float_of(value), -float_of(value)}, inverse, inverse);
  REQUIRE((elements & 0xff) == (elements >> 8 ^ 0x80));
  return elements & 0xff;
}

void check_values() {
  for (int scale = 0; scale < kMxNanScale; ++scale) {
    for (int low = 0; low < 256; ++low) {
      const int high = low ^ 0x95, other_scale = 254 - scale;
      const MxPair pair = mx_values(low | high << 8, mx_factors(scale), mx_factors(other_scale));
      if ((low & 0x7f) != kMxNanElement) {
        REQUIRE(std::bit_cast<uint32_t>(pair.low) == mx_value(low, scale));
      }
      if ((high & 0x7f) != kMxNanElement) {
        REQUIRE(std::bit_cast<uint32_t>(pair.high) == mx_value(high, other_scale));
      }
    }
  }
}

void check_every_bfloat16() {
  for (uint32_t value = 0; value < 0x7f80; ++value) {
    for (int scale = mx_scale(value << 16); scale < kScales; ++scale) {
      REQUIRE(pair_element(value << 16, scale) == mx_element(value << 16, scale));
    }
  }
}

// Both codecs grow with the magnitude, so they are the same for all floats if they are the same on
// both sides of each of core/mx.h's steps.
void check_both_sides_of_every_step() {
  for (int scale = 0; scale < kScales; ++scale) {
    uint32_t largest = 0, beyond = 0x7f800000;  // the largest float that the scale fits
    while (beyond - largest > 1) {
      const uint32_t middle = largest + (beyond - largest) / 2;
      (mx_scale(middle) <= scale ? largest : beyond) = middle;
    }
    REQUIRE(pair_element(0, scale) == 0);
    REQUIRE(pair_element(largest, scale) == mx_element(largest, scale));
    for (int element = 0; element < mx_element(largest, scale); ++element) {
      uint32_t below = 0, above = largest;  // of the last float with this element or a lesser one
      while (above - below > 1) {
        const uint32_t middle = below + (above - below) / 2;
        (mx_element(middle, scale) <= element ? below : above) = middle;
      }
      REQUIRE(pair_element(below, scale) == mx_element(below, scale));
      REQUIRE(pair_element(above, scale) == mx_element(above, scale));
    }
  }
}

// Every `count` lanes of a warp, `step` apart, get what their words combine to.
template <typename Combine>
void combine_lanes(const std::vector<uint32_t*>& lanes, int count, int step,
                   const Combine& combine) {
  for (int lane = 0; lane < kMxLanes; ++lane) {
    if (lane / step % count != 0) continue;
    uint32_t combined = 0;
    for (int i = 0; i < count; ++i) combined = combine(combined, *lanes[lane + i * step]);
    for (int i = 0; i < count; ++i) *lanes[lane + i * step] = combined;
  }
}

uint32_t larger(uint32_t a, uint32_t b) { return std::max(a, b); }

// The warps of the kernels of sm90/mx.cu.
template <typename Lane, typename Arrays>
std::vector<std::unique_ptr<Lane>> lanes_of(const Arrays& arrays, int64_t warp) {
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int lane = 0; lane < kMxLanes; ++lane) {
    lanes.push_back(std::make_unique<Lane>(arrays, warp, lane));
    lanes.back()->load();
  }
  return lanes;
}

template <typename Lane>
bool all_finite(const std::vector<std::unique_ptr<Lane>>& lanes) {
  return std::all_of(lanes.begin(), lanes.end(),
                     [](const auto& lane) { return lane->is_finite(); });
}

template <typename From, typename To>
void run_contiguous(const MxArrays<From, To>& arrays) {
  using Lane = MxContiguousLane<From, To>;
  for (int64_t warp = 0; warp * Lane::kBlocksPerWarp < arrays.blocks; ++warp) {
    const auto lanes = lanes_of<Lane>(arrays, warp);
    for (int i = 0; !kIsElements<From> && i < Lane::kVectors; ++i) {
      std::vector<uint32_t*> words;
      for (const auto& lane : lanes) words.push_back(&lane->largest[i]);
      combine_lanes(words, Lane::kLanesPerBlock, 1, larger);
    }
    const bool finite = all_finite(lanes);
    for (const auto& lane : lanes) finite ? lane->convert() : lane->convert_carefully();
  }
}

template <typename From, typename To>
void run_strided(const MxArrays<From, To>& arrays) {
  using Lane = MxStridedLane<From, To>;
  for (int64_t warp = 0; warp * Lane::kColumnsPerWarp < arrays.blocks * arrays.inner; ++warp) {
    const auto lanes = lanes_of<Lane>(arrays, warp);
    for (int i = 0; !kIsElements<From> && i < decltype(Lane::largest)::kWords; ++i) {
      std::vector<uint32_t*> words;
      for (const auto& lane : lanes) words.push_back(&lane->largest.word[i]);
      combine_lanes(words, Lane::kGroups, Lane::kLanesAcross, mx_larger<From>);
    }
    const bool finite = all_finite(lanes);
    for (const auto& lane : lanes) finite ? lane->convert() : lane->convert_carefully();
    if constexpr (!kIsElements<From> && !kIsElements<To>) {
      for (int i = 0; finite && arrays.across != nullptr && i < Lane::kRows; ++i) {
        std::vector<uint32_t> magnitudes;
        for (const auto& lane : lanes) magnitudes.push_back(lane->largest_across(i));
        std::vector<uint32_t*> words;
        for (uint32_t& magnitude : magnitudes) words.push_back(&magnitude);
        combine_lanes(words, Lane::kLanesPerBlockAcross, 1, larger);
        for (int lane = 0; lane < kMxLanes; ++lane) {
          lanes[lane]->convert_across(i, magnitudes[lane]);
        }
      }
      for (const auto& lane : lanes) {
        if (!finite && arrays.across != nullptr) lane->convert_across_carefully();
      }
    }
  }
}

template <typename From, typename To>
void run_blocks(const MxArrays<From, To>& arrays) {
  for (int64_t i = 0; i < arrays.blocks * arrays.inner; ++i) {
    const int64_t block = i / arrays.inner, column = i % arrays.inner;
    mx_convert_block(arrays, arrays.to, block * kMxBlock * arrays.inner + column, i, arrays.inner);
  }
}

// Finite for the most part, or of any bits.
template <typename T>
std::vector<T> draw(int64_t count, bool wild, std::mt19937& rng) {
  std::vector<T> values(count);
  for (T& value : values) {
    if (kIsElements<T>) {
      value = static_cast<T>(rng() % (wild ? 256 : 127));
      continue;
    }
    uint32_t bits = rng();
    if (!wild || rng() % 4 != 0) bits = (bits & 0x8fffffff) | 0x30000000;
    value = static_cast<T>(0);
    if constexpr (std::is_same_v<T, float>) {
      value = float_of(bits);
    } else {
      value = static_cast<T>(bits >> 16);
    }
  }
  return values;
}

template <typename T>
using Host = std::conditional_t<std::is_same_v<T, uint16_t>, BFloat16, T>;

// By host/mx.h.
template <typename From, typename To>
void define(const MxArrays<From, To>& arrays, MxShape shape) {
  const auto* from = reinterpret_cast<const Host<From>*>(arrays.from);
  auto* to = reinterpret_cast<Host<To>*>(arrays.to);
  if constexpr (kIsElements<From>) {
    mx_dequantize(from, arrays.from_scales, shape, to);
  } else if constexpr (kIsElements<To>) {
    mx_quantize(from, shape, to, arrays.to_scales);
  } else {
    mx_round(from, shape, to);
    if (arrays.across != nullptr) {
      mx_round(from, {shape.outer * shape.length, shape.inner, 1},
               reinterpret_cast<Host<To>*>(arrays.across));
    }
  }
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <typename From, typename To>
void check_arrays(std::mt19937& rng) {
  for (const bool wild : {false, true}) {
    for (const MxShape shape : {MxShape{3, 64, 1}, MxShape{1, 32 * 67, 1}, MxShape{2, 32, 5},
                                MxShape{1, 96, 8}, MxShape{3, 64, 32}, MxShape{2, 64, 160}}) {
      const int64_t count = shape.outer * shape.length * shape.inner;
      const std::vector<From> from = draw<From>(count, wild, rng);
      const std::vector<uint8_t> from_scales = draw<uint8_t>(count / kMxBlock, wild, rng);
      constexpr bool kRounds = !kIsElements<From> && !kIsElements<To>;
      struct Results {
        std::vector<To> to, across;
        std::vector<uint8_t> scales;
      };
      const auto run = [&](const auto& convert, bool along_both) {
        Results results{std::vector<To>(count, To(0x5e)), std::vector<To>(count, To(0x5e)),
                        std::vector<uint8_t>(count / kMxBlock, 0x5e)};
        const MxArrays<From, To> arrays = {
            .from = from.data(),
            .from_scales = from_scales.data(),
            .to = results.to.data(),
            .to_scales = results.scales.data(),
            .blocks = shape.outer * shape.length / kMxBlock,
            .inner = shape.inner,
            .across = along_both ? results.across.data() : nullptr,
        };
        convert(arrays);
        return results;
      };
      const auto compare = [&](const Results& got, const Results& want) {
        REQUIRE(same_bits(got.to, want.to));
        REQUIRE(same_bits(got.across, want.across));
        REQUIRE(same_bits(got.scales, want.scales));
      };
      const auto defined = [&](const auto& arrays) { define(arrays, shape); };
      const Results want = run(defined, false);
      compare(run(run_blocks<From, To>, false), want);
      if (shape.inner == 1) {
        compare(run(run_contiguous<From, To>, false), want);
      } else if (shape.inner % kMxVector<From, To> == 0) {
        compare(run(run_strided<From, To>, false), want);
        if (kRounds && shape.inner % kMxBlock == 0) {
          compare(run(run_strided<From, To>, true), run(defined, true));
        }
      }
    }
  }
}

}  // namespace

int main() {
  std::mt19937 rng(2);
  check_values();
  check_every_bfloat16();
  check_both_sides_of_every_step();
  check_arrays<float, uint8_t>(rng);
  check_arrays<uint16_t, uint8_t>(rng);
  check_arrays<uint8_t, float>(rng);
  check_arrays<uint8_t, uint16_t>(rng);
  check_arrays<float, float>(rng);
  check_arrays<float, uint16_t>(rng);
  check_arrays<uint16_t, float>(rng);
  check_arrays<uint16_t, uint16_t>(rng);
}
