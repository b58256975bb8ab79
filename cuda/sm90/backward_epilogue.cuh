#pragma once

#include "sm90/epilogue.cuh"
#include "sm90/ptx.cuh"

// SwiGLU backward for one value. Every product and sum is rounded by itself, whatever the compiler
// may prefer, so that all variants of the kernel give the same bits.
namespace mok::sm90 {

struct SwigluGradient {
  float hidden;  // silu(gate) * up
  float d_gate;  // of the weighted d_hidden
  float d_up;
};

template <bool kClamps>
__device__ SwigluGradient swiglu_gradient(float stored_gate, float stored_up,
                                          float weighted_d_hidden, float limit) {
  float gate = stored_gate, up = stored_up;
  if constexpr (kClamps) {  // written so that a NaN stays one
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
  }
  const float sigmoid = sigmoid_of(gate);
  const float silu = __fmul_rn(gate, sigmoid);
  const float slope = __fadd_rn(sigmoid, __fmul_rn(silu, __fadd_rn(1.0f, -sigmoid)));
  const float d_gate = __fmul_rn(__fmul_rn(weighted_d_hidden, up), slope);
  const float d_up = __fmul_rn(weighted_d_hidden, silu);
  return {__fmul_rn(silu, up), kClamps && stored_gate >= limit ? 0.0f : d_gate,
          kClamps && fabsf(stored_up) >= limit ? 0.0f : d_up};
}

__device__ inline uint32_t word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Sum over the four lanes that hold a row's columns, the same in all of them.
__device__ inline float sum_of_quad(float value) {
  value = __fadd_rn(value, __shfl_xor_sync(kAllLanes, value, 1));
  return __fadd_rn(value, __shfl_xor_sync(kAllLanes, value, 2));
}

}  // namespace mok::sm90
