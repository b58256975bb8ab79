#include "core/plan.h"
#include "device/inject.cuh"
#include "device/load_kernels.h"
#include "sm90/bf16.cuh"
#include "sm90/weighted_sum.h"

namespace mok::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // bf16 in 16 bytes
constexpr int kAtOnce = 8;  // rows a thread has under way

template <bool kPulls>
__device__ const uint4* row_of(const WeightedSumParams& params, int64_t choice, int vectors) {
  const void* begin = params.slots;
  int64_t row = choice;
  if constexpr (kPulls) {
    begin = params.outputs;
    if (params.bases != nullptr) {
      inject::delays(Hook::kPullRow, params.slot_rank[choice]);
      begin = params.bases[params.slot_rank[choice]] + params.outputs_offset;
    }
    row = params.slot_row[choice];
  }
  return static_cast<const uint4*>(begin) + row * vectors;
}

// A thread sums 16 bytes of columns.
template <bool kPulls>
__global__ void __launch_bounds__(kThreads) weighted_sum_kernel(const WeightedSumParams params) {
  const int vectors = params.width / kVector;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t token = index / vectors;
  if (token >= params.tokens) {
    return;
  }
  const int64_t vector = index - token * vectors;
  const int64_t first = token * params.top_k;

  float sum[kVector] = {};
  for (int begin = 0; begin < params.top_k; begin += kAtOnce) {
    uint4 row[kAtOnce];
    float weight[kAtOnce];
    bool present[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t choice = first + begin + k;
      present[k] = begin + k < params.top_k && params.slot_rank[choice] != kMaskedChoice;
      if (present[k]) {
        row[k] = __ldcs(row_of<kPulls>(params, choice, vectors) + vector);
        weight[k] = params.weights == nullptr ? 1.0f : params.weights[choice];
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (present[k]) {
        const uint32_t words[4] = {row[k].x, row[k].y, row[k].z, row[k].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(weight[k], low_bf16(words[i])));
          sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(weight[k], high_bf16(words[i])));
        }
      }
    }
  }
  reinterpret_cast<uint4*>(params.out)[index] = {
      pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
      pack_bf16(sum[6], sum[7])};
}

__device__ float to_f32(float value) { return value; }
__device__ float to_f32(uint16_t bf16) { return low_bf16(bf16); }
__device__ void store(float sum, float* to) { *to = sum; }
__device__ void store(float sum, uint16_t* to) {
  *to = static_cast<uint16_t>(pack_bf16(sum, 0.0f));
}

// A thread sums one column of a token.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_columns(const T* slots, const int32_t* slot_rank, const float* weights, int64_t tokens,
                int64_t top_k, int64_t width, T* out) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t token = index / width;
  if (token >= tokens) {
    return;
  }
  const int64_t column = index - token * width;
  float sum = 0.0f;
  for (int64_t choice = token * top_k; choice < (token + 1) * top_k; ++choice) {
    if (slot_rank[choice] != kMaskedChoice) {
      sum = __fadd_rn(sum, __fmul_rn(weights[choice], to_f32(slots[choice * width + column])));
    }
  }
  store(sum, out + index);
}

unsigned blocks_of(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

}  // namespace

cudaError_t weighted_sum(const WeightedSumParams& params, cudaStream_t stream) {
  const int64_t threads = params.tokens * (params.width / kVector);
  if (threads == 0) {
    return cudaSuccess;
  }
  const auto kernel =
      params.slots == nullptr ? weighted_sum_kernel<true> : weighted_sum_kernel<false>;
  kernel<<<blocks_of(threads), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <typename T>
cudaError_t weighted_sum_of_slots(const T* slots, const int32_t* slot_rank, const float* weights,
                                  int64_t tokens, int64_t top_k, int64_t width, T* out,
                                  cudaStream_t stream) {
  if (tokens * width == 0) {
    return cudaSuccess;
  }
  sum_columns<<<blocks_of(tokens * width), kThreads, 0, stream>>>(slots, slot_rank, weights, tokens,
                                                                  top_k, width, out);
  return cudaGetLastError();
}

template cudaError_t weighted_sum_of_slots(const float*, const int32_t*, const float*, int64_t,
                                           int64_t, int64_t, float*, cudaStream_t);
template cudaError_t weighted_sum_of_slots(const uint16_t*, const int32_t*, const float*, int64_t,
                                           int64_t, int64_t, uint16_t*, cudaStream_t);

cudaError_t load_weighted_sum() {
  return load_kernels(weighted_sum_kernel<true>, weighted_sum_kernel<false>, sum_columns<float>,
                      sum_columns<uint16_t>);
}

}  // namespace mok::sm90
