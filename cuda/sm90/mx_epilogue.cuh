#pragma once

#include "core/mx_floats.h"
#include "device/mx_rows.cuh"
#include "sm90/fragment.h"

namespace mok::sm90 {

// Rounds to MXFP8 a thread's values of some blocks, between accumulators and rows of bf16. All
// lanes call it.
template <int kBlocks>
__device__ __forceinline__ void round_in_quads(float (&values)[kBlocks][kBlockValues]) {
  mx_round(values, largest_of_quad, any_of_warp);
}

}  // namespace mok::sm90
