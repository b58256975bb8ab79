#pragma once

#include "sm90/weight_gradients.cuh"

// Partial sums of the weights' gradients of an expert astride waves, exact to the bit. They lie
// where the gradients will: of f32 whole; of bf16 the upper halves of their words, the lower ones
// apart in the order of the threads' accumulators.
namespace mok::sm90 {

// Of a thread, so many accumulators fill a vector with their lower halves.
constexpr int kHalvesOfVector = 8;
constexpr int kVectorsOfThread = kAccumulators / kHalvesOfVector;

// Calls visit(i, element) for a thread's accumulators that are elements of the gradients.
template <typename Out, typename Visit>
__device__ __forceinline__ void for_each_element(const BackwardParams& params,
                                                 const WeightPlace& place, const Visit& visit) {
  const int thread = threadIdx.x % kWarpgroup;
  const int row = place.row + thread / kWarp * kWarpRows + thread % kWarp / 4;
  const int column = place.column + thread % 4 * 2;
  const int64_t hidden = params.hidden, inner = params.inner;
  if (place.row >= hidden) {
    return;
  }
  // A thread holds, for every eight columns, two of a row and two of the row eight below.
  if (place.is_down) {
    Out* element =
        static_cast<Out*>(params.d_down_data) + (place.expert * inner + column) * hidden + row;
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 4) {
      if (place.column + i / kPanelAccumulators * kPanelColumns < inner) {
        visit(i, element);
        visit(i + 1, element + hidden);
        visit(i + 2, element + 8);
        visit(i + 3, element + hidden + 8);
      }
      element += kQuadColumns * hidden;
    }
  } else {
    const int64_t offset = (place.expert * hidden + row) * inner + column;
    Out* const gates = static_cast<Out*>(params.d_gate_data) + offset;
    Out* const ups = static_cast<Out*>(params.d_up_data) + offset;
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 4) {
      const int panel = i / kPanelAccumulators;  // of gate and up by turns
      if (place.column + panel / 2 * kPanelColumns < inner) {
        Out* const element = (panel % 2 == 0 ? gates : ups) + panel / 2 * kPanelColumns +
                             i % kPanelAccumulators / 4 * kQuadColumns;
        visit(i, element);
        visit(i + 1, element + 1);
        visit(i + 2, element + 8 * inner);
        visit(i + 3, element + 8 * inner + 1);
      }
    }
  }
}

// Where this thread's lower halves begin; the next vector is `kThreadsOfBlock` behind. `block`
// counts the blocks of an expert's items.
constexpr int kThreadsOfBlock = kBlockTiles * kWarpgroup;
__device__ inline uint4* lower_halves_of(const BackwardParams& params, int64_t block) {
  return params.lower_halves + block * kVectorsOfThread * kThreadsOfBlock +
         (threadIdx.x - kWarpgroup);
}

__device__ __forceinline__ void keep_partial_sums(const BackwardParams& params,
                                                  const WeightPlace& place, int64_t block,
                                                  const float (&accumulators)[kAccumulators]) {
  if (params.dw_is_f32) {
    for_each_element<float>(params, place,
                            [&](int i, float* element) { __stcg(element, accumulators[i]); });
    return;
  }
  const auto bits = [&](int i) { return __float_as_uint(accumulators[i]); };
  for_each_element<uint16_t>(params, place, [&](int i, uint16_t* element) {
    __stcg(element, static_cast<uint16_t>(bits(i) >> 16));
  });
  const auto halves = [&](int i) { return __byte_perm(bits(i), bits(i + 1), 0x5410); };
  uint4* const lower = lower_halves_of(params, block);
#pragma unroll
  for (int v = 0; v < kVectorsOfThread; ++v) {
    const int i = v * kHalvesOfVector;
    __stcg(lower + v * kThreadsOfBlock,
           uint4{halves(i), halves(i + 2), halves(i + 4), halves(i + 6)});
  }
}

// What `keep_partial_sums` has kept; of what is no element, zero or anything.
__device__ __forceinline__ void read_partial_sums(const BackwardParams& params,
                                                  const WeightPlace& place, int64_t block,
                                                  float (&accumulators)[kAccumulators]) {
#pragma unroll
  for (float& value : accumulators) {
    value = 0.0f;
  }
  if (params.dw_is_f32) {
    for_each_element<float>(
        params, place, [&](int i, const float* element) { accumulators[i] = __ldcg(element); });
  } else {
    for_each_element<uint16_t>(params, place, [&](int i, const uint16_t* element) {
      accumulators[i] = __uint_as_float(uint32_t{__ldcg(element)} << 16);
    });
    const uint4* const lower = lower_halves_of(params, block);
#pragma unroll
    for (int v = 0; v < kVectorsOfThread; ++v) {
      const uint4 halves = __ldcg(lower + v * kThreadsOfBlock);
#pragma unroll
      for (int i = 0; i < kHalvesOfVector; ++i) {
        const uint32_t half = __byte_perm(word_of(halves, i / 2), 0, i % 2 == 0 ? 0x4410 : 0x4432);
        float& value = accumulators[v * kHalvesOfVector + i];
        value = __uint_as_float(__float_as_uint(value) | half);
      }
    }
  }
  fence_proxies_global();  // the gradients follow by tensor stores
}

}  // namespace mok::sm90
