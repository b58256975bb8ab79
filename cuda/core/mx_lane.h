#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/host_device.h"
#include "core/mx.h"
#include "core/mx_pair.h"

// What one lane of a warp does where arrays are converted to MXFP8, from it, or to it and back. All
// but the exchange between lanes is here, and runs on the host too.
//
// Arrays are [blocks, 32, inner]. From and To are float, uint16_t for bfloat16, or uint8_t for
// elements, which have scales [blocks, inner] beside them. Lanes read and write vectors of
// contiguous elements, 16 bytes of the wider type.
namespace mok {

template <typename T>
constexpr bool kIsElements = std::is_same_v<T, uint8_t>;

template <typename From, typename To>
struct MxArrays {
  const From* from;
  const uint8_t* from_scales;  // null unless From is elements
  To* to;
  uint8_t* to_scales;  // null unless To is elements
  int64_t blocks;
  int64_t inner;
  // Null, or what becomes of `from` with blocks along `inner`, a multiple of 32; not of elements.
  To* across = nullptr;
};

// Converts one block by the code of core/mx.h alone: the elements `stride` apart from `offset` on,
// whose scale lies at `scale_offset`, to the same places of `to`.
template <typename From, typename To>
MOK_HOST_DEVICE void mx_convert_block(const MxArrays<From, To>& arrays, To* to, int64_t offset,
                                      int64_t scale_offset, int64_t stride) {
  const auto bits_of = [&](int row) {
    const From value = arrays.from[offset + row * stride];
    if constexpr (std::is_same_v<From, float>) {
      return std::bit_cast<uint32_t>(value);
    } else {
      return static_cast<uint32_t>(value) << 16;
    }
  };
  uint8_t scale;
  if constexpr (kIsElements<From>) {
    scale = arrays.from_scales[scale_offset];
  } else {
    uint32_t largest = 0;
    for (int row = 0; row < kMxBlock; ++row) {
      const uint32_t magnitude = mx_magnitude(bits_of(row));
      largest = magnitude > largest ? magnitude : largest;
    }
    scale = mx_scale(largest);
  }
  if constexpr (kIsElements<To>) {
    arrays.to_scales[scale_offset] = scale;
  }
  for (int row = 0; row < kMxBlock; ++row) {
    uint8_t element;
    if constexpr (kIsElements<From>) {
      element = arrays.from[offset + row * stride];
    } else {
      element = mx_element(bits_of(row), scale);
    }
    To& result = to[offset + row * stride];
    if constexpr (kIsElements<To>) {
      result = element;
    } else if constexpr (std::is_same_v<To, float>) {
      result = std::bit_cast<float>(mx_value(element, scale));
    } else {
      result = static_cast<uint16_t>(mx_value(element, scale) >> 16);
    }
  }
}

// Elements of a lane's vector.
template <typename From, typename To>
constexpr int kMxVector = 16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));

template <typename T, int kCount>
struct MxWords {
  static constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
  uint32_t word[kWords];
};

template <typename T, int kCount>
MOK_HOST_DEVICE MxWords<T, kCount> mx_load(const T* at) {
  MxWords<T, kCount> words;
#ifdef __CUDA_ARCH__  // nothing is read twice, but by those who meet what is not finite
  if constexpr (words.kWords == 4) {
    const uint4 loaded = __ldcs(reinterpret_cast<const uint4*>(at));
    words.word[0] = loaded.x, words.word[1] = loaded.y;
    words.word[2] = loaded.z, words.word[3] = loaded.w;
  } else if constexpr (words.kWords == 2) {
    const uint2 loaded = __ldcs(reinterpret_cast<const uint2*>(at));
    words.word[0] = loaded.x, words.word[1] = loaded.y;
  } else {
    words.word[0] = __ldcs(reinterpret_cast<const uint32_t*>(at));
  }
#else
  std::memcpy(words.word, at, sizeof(words.word));
#endif
  return words;
}

template <typename T, int kCount>
MOK_HOST_DEVICE void mx_store(const MxWords<T, kCount>& words, T* at) {
#ifdef __CUDA_ARCH__  // left to itself, the compiler takes some of these stores apart
  if constexpr (words.kWords == 4) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(at), "r"(words.word[0]), "r"(words.word[1]), "r"(words.word[2]),
                   "r"(words.word[3])
                 : "memory");
  } else if constexpr (words.kWords == 2) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};"
                 :
                 : "l"(at), "r"(words.word[0]), "r"(words.word[1])
                 : "memory");
  } else {
    asm volatile("st.global.u32 [%0], %1;" : : "l"(at), "r"(words.word[0]) : "memory");
  }
#else
  std::memcpy(at, words.word, sizeof(words.word));
#endif
}

// Magnitudes in a word of floats, or of two bfloat16s. They are ordered as their bits are; those
// that are not finite are the largest.
template <typename T>
MOK_HOST_DEVICE uint32_t mx_magnitudes(uint32_t word) {
  return word & (sizeof(T) == 4 ? 0x7fffffff : 0x7fff7fff);
}

template <typename T>
MOK_HOST_DEVICE uint32_t mx_larger(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 4) {
    return a > b ? a : b;
  } else {
#ifdef __CUDA_ARCH__
    uint32_t larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
#else
    const uint32_t low = (a & 0xffff) > (b & 0xffff) ? a : b;
    const uint32_t high = a >> 16 > b >> 16 ? a : b;
    return (low & 0xffff) | (high & 0xffff0000);
#endif
  }
}

// The i-th magnitude of such words, as that of a float.
template <typename T, int kCount>
MOK_HOST_DEVICE uint32_t mx_float_at(const MxWords<T, kCount>& words, int i) {
  if constexpr (sizeof(T) == 4) {
    return words.word[i];
  } else {
    return i % 2 == 0 ? words.word[i / 2] << 16 : words.word[i / 2] & 0xffff0000;
  }
}

// The largest of all.
template <typename T, int kCount>
MOK_HOST_DEVICE uint32_t mx_largest(const MxWords<T, kCount>& values) {
  uint32_t largest = 0;
  MOK_UNROLL
  for (const uint32_t word : values.word) {
    largest = mx_larger<T>(largest, mx_magnitudes<T>(word));
  }
  if constexpr (sizeof(T) == 2) {
    const uint32_t low = largest << 16, high = largest & 0xffff0000;
    largest = low > high ? low : high;
  }
  return largest;
}

MOK_HOST_DEVICE inline bool mx_is_finite(uint32_t magnitude) {
  return magnitude < mx_detail::kInfinity;
}

// Whether one of four elements is NaN.
MOK_HOST_DEVICE inline bool mx_any_nan(uint32_t elements) {
  return (((elements & 0x7f7f7f7f) + 0x01010101) & 0x80808080) != 0;
}

// A vector of finite numbers, whose elements have a scale each or all the same one.
template <typename To, typename From, int kCount, int kScales>
MOK_HOST_DEVICE MxWords<To, kCount> mx_convert(const MxWords<From, kCount>& from,
                                               const MxFactors (&factors)[kScales]) {
  static_assert(kScales == kCount || kScales == 1);
  const auto factors_of = [&](int i) -> const MxFactors& { return factors[i % kScales]; };
  MxWords<To, kCount> to;
  MOK_UNROLL
  for (int first = 0; first < kCount; first += 2) {
    const int shift = first % 4 * 8;
    uint32_t elements;
    if constexpr (kIsElements<From>) {
      elements = from.word[first / 4] >> shift & 0xffff;
    } else {
      const MxPair values = {std::bit_cast<float>(mx_float_at(from, first)),
                             std::bit_cast<float>(mx_float_at(from, first + 1))};
      elements = mx_elements(values, factors_of(first).inverse, factors_of(first + 1).inverse);
    }
    if constexpr (kIsElements<To>) {
      to.word[first / 4] = shift == 0 ? elements : to.word[first / 4] | elements << shift;
    } else {
      const MxPair values = mx_values(elements, factors_of(first), factors_of(first + 1));
      const uint32_t low = std::bit_cast<uint32_t>(values.low);
      const uint32_t high = std::bit_cast<uint32_t>(values.high);
      if constexpr (sizeof(To) == 4) {
        to.word[first] = low;
        to.word[first + 1] = high;
      } else {
        to.word[first / 2] = low >> 16 | (high & 0xffff0000);
      }
    }
  }
  return to;
}

constexpr int kMxLanes = 32;  // of a warp

// Of a warp that converts contiguous blocks: inner is 1. Lanes that follow each other have a
// block's vectors.
template <typename From, typename To>
class MxContiguousLane {
 public:
  static constexpr int kVector = kMxVector<From, To>;
  static constexpr int kLanesPerBlock = kMxBlock / kVector;
  static constexpr int kVectors = 4;  // that are under way together
  static constexpr int kBlocksPerWarp = kMxLanes * kVectors / kLanesPerBlock;

  MOK_HOST_DEVICE MxContiguousLane(const MxArrays<From, To>& arrays, int64_t warp, int lane)
      : arrays_(arrays), first_block_(warp * kBlocksPerWarp), lane_(lane) {}

  MOK_HOST_DEVICE void load() {
    MOK_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      vectors_[i] = {};
      if (is_there(i)) {
        vectors_[i] = mx_load<From, kVector>(arrays_.from + offset_of(i));
        if constexpr (kIsElements<From>) {
          scales_[i] = arrays_.from_scales[block_of(i)];
        }
      }
    }
    if constexpr (!kIsElements<From>) {
      MOK_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        largest[i] = mx_largest(vectors_[i]);
      }
    }
  }

  // Magnitudes; before what follows they become those of the blocks, the largest of kLanesPerBlock
  // lanes.
  uint32_t largest[kVectors];

  MOK_HOST_DEVICE bool is_finite() const {
    bool finite = true;
    MOK_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (!kIsElements<From>) {
        finite = finite && mx_is_finite(largest[i]);
      } else if (is_there(i)) {
        finite = finite && scales_[i] != kMxNanScale;
        MOK_UNROLL
        for (const uint32_t word : vectors_[i].word) {
          finite = finite && !mx_any_nan(word);
        }
      }
    }
    return finite;
  }

  // What is finite.
  MOK_HOST_DEVICE void convert() const {
    MOK_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      if (is_there(i)) {
        const uint8_t scale = kIsElements<From> ? scales_[i] : mx_scale(largest[i]);
        const MxFactors factors[] = {mx_factors(scale)};
        mx_store(mx_convert<To>(vectors_[i], factors), arrays_.to + offset_of(i));
        if (kIsElements<To> && lane_ % kLanesPerBlock == 0) {
          arrays_.to_scales[block_of(i)] = scale;
        }
      }
    }
  }

  // Anything; each lane takes blocks of the warp.
  MOK_HOST_DEVICE void convert_carefully() const {
    const int64_t block = first_block_ + lane_;
    if (lane_ < kBlocksPerWarp && block < arrays_.blocks) {
      mx_convert_block(arrays_, arrays_.to, block * kMxBlock, block, /*stride=*/1);
    }
  }

 private:
  MOK_HOST_DEVICE int64_t block_of(int i) const {
    return first_block_ + (i * kMxLanes + lane_) / kLanesPerBlock;
  }
  MOK_HOST_DEVICE int64_t offset_of(int i) const {
    return first_block_ * kMxBlock + (i * kMxLanes + lane_) * kVector;
  }
  MOK_HOST_DEVICE bool is_there(int i) const { return block_of(i) < arrays_.blocks; }

  const MxArrays<From, To>& arrays_;
  const int64_t first_block_;
  const int lane_;
  MxWords<From, kVector> vectors_[kVectors];
  uint8_t scales_[kVectors];  // of elements
};

// Of a warp that converts blocks across 64 columns: a lane has the same vector of every kGroups-th
// row. Columns are counted through all blocks; vectors lie in one, so inner is a multiple of
// kVector.
template <typename From, typename To>
class MxStridedLane {
 public:
  static constexpr int kVector = kMxVector<From, To>;
  static constexpr int kColumnsPerWarp = 64;
  static constexpr int kLanesAcross = kColumnsPerWarp / kVector;
  static constexpr int kGroups = kMxLanes / kLanesAcross;
  static constexpr int kRows = kMxBlock / kGroups;
  static constexpr int kLanesPerBlockAcross = kMxBlock / kVector;

  MOK_HOST_DEVICE MxStridedLane(const MxArrays<From, To>& arrays, uint32_t warp, int lane)
      : arrays_(arrays), lane_(lane), group_(lane / kLanesAcross) {
    const uint32_t vectors_per_row = static_cast<uint32_t>(arrays.inner / kVector);
    const uint32_t vector = warp * kLanesAcross + lane % kLanesAcross;
    block_ = vector / vectors_per_row;
    column_ = int64_t{vector - block_ * vectors_per_row} * kVector;
    is_there_ = block_ < arrays.blocks;
  }

  MOK_HOST_DEVICE void load() {
    for (uint32_t& word : largest.word) {
      word = 0;
    }
    if (!is_there_) {
      return;
    }
    MOK_UNROLL
    for (int i = 0; i < kRows; ++i) {
      rows_[i] = mx_load<From, kVector>(arrays_.from + offset_of(i));
    }
    if constexpr (kIsElements<From>) {
      scales_ = mx_load<uint8_t, kVector>(arrays_.from_scales + scales_offset());
    } else {
      MOK_UNROLL
      for (int i = 0; i < kRows; ++i) {
        MOK_UNROLL
        for (int w = 0; w < largest.kWords; ++w) {
          largest.word[w] = mx_larger<From>(largest.word[w], mx_magnitudes<From>(rows_[i].word[w]));
        }
      }
    }
  }

  // Magnitudes; before what follows they become those of the blocks, the larger words, by
  // mx_larger, of those of kGroups lanes, kLanesAcross apart.
  MxWords<From, kVector> largest;

  MOK_HOST_DEVICE bool is_finite() const {
    bool finite = true;
    if constexpr (!kIsElements<From>) {
      MOK_UNROLL
      for (int i = 0; i < kVector; ++i) {
        finite = finite && mx_is_finite(mx_float_at(largest, i));
      }
    } else if (is_there_) {
      MOK_UNROLL
      for (const uint32_t word : scales_.word) {
        finite = finite && ((~word - 0x01010101) & word & 0x80808080) == 0;
      }
      MOK_UNROLL
      for (int i = 0; i < kRows; ++i) {
        MOK_UNROLL
        for (const uint32_t word : rows_[i].word) {
          finite = finite && !mx_any_nan(word);
        }
      }
    }
    return finite;
  }

  // What is finite.
  MOK_HOST_DEVICE void convert() const {
    if (!is_there_) {
      return;
    }
    MxWords<uint8_t, kVector> scales = {};
    MxFactors factors[kVector];
    MOK_UNROLL
    for (int i = 0; i < kVector; ++i) {
      uint8_t scale;
      if constexpr (kIsElements<From>) {
        scale = static_cast<uint8_t>(scales_.word[i / 4] >> i % 4 * 8);
      } else {
        scale = mx_scale(mx_float_at(largest, i));
        scales.word[i / 4] |= static_cast<uint32_t>(scale) << i % 4 * 8;
      }
      factors[i] = mx_factors(scale);
    }
    MOK_UNROLL
    for (int i = 0; i < kRows; ++i) {
      mx_store(mx_convert<To>(rows_[i], factors), arrays_.to + offset_of(i));
    }
    if constexpr (kIsElements<To>) {
      if (group_ == 0) {
        mx_store(scales, arrays_.to_scales + scales_offset());
      }
    }
  }

  // Anything; the lanes share the columns of a vector.
  MOK_HOST_DEVICE void convert_carefully() const {
    if (!is_there_) {
      return;
    }
    const int64_t offset = int64_t{block_} * kMxBlock * arrays_.inner + column_;
    for (int i = group_; i < kVector; i += kGroups) {
      mx_convert_block(arrays_, arrays_.to, offset + i, scales_offset() + i, arrays_.inner);
    }
  }

  // The same for the blocks across the rows, whose vectors kLanesPerBlockAcross lanes have that
  // follow each other. `magnitude` is the largest of all, of what this returns for each:
  MOK_HOST_DEVICE uint32_t largest_across(int i) const {
    return is_there_ ? mx_largest(rows_[i]) : 0;
  }

  MOK_HOST_DEVICE void convert_across(int i, uint32_t magnitude) const {
    if (is_there_) {
      const MxFactors factors[] = {mx_factors(mx_scale(magnitude))};
      mx_store(mx_convert<To>(rows_[i], factors), arrays_.across + offset_of(i));
    }
  }

  MOK_HOST_DEVICE void convert_across_carefully() const {
    if (!is_there_) {
      return;
    }
    const int lane = lane_ % kLanesPerBlockAcross;
    for (int i = lane; i < kRows; i += kLanesPerBlockAcross) {
      mx_convert_block(arrays_, arrays_.across, offset_of(i) - lane * kVector,
                       /*scale_offset=*/0, /*stride=*/1);
    }
  }

 private:
  MOK_HOST_DEVICE int64_t offset_of(int i) const {
    return (int64_t{block_} * kMxBlock + i * kGroups + group_) * arrays_.inner + column_;
  }
  MOK_HOST_DEVICE int64_t scales_offset() const { return block_ * arrays_.inner + column_; }

  const MxArrays<From, To>& arrays_;
  const int lane_;
  const int group_;
  uint32_t block_;
  int64_t column_;
  bool is_there_;
  MxWords<From, kVector> rows_[kRows];
  MxWords<uint8_t, kVector> scales_;  // of elements
};

}  // namespace mok
