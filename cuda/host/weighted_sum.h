#pragma once

#include <cstdint>

#include "core/plan.h"
#include "host/number.h"

namespace mok {

// out[t] = sum over k of weights[t, k] * slots[t, k], in f32, k ascending, masked choices left out.
// slots is [tokens, top_k, width], out is [tokens, width]; T is float or BFloat16.
template <typename T>
void weighted_sum(const T* slots, const int32_t* slot_rank, const float* weights, int64_t tokens,
                  int64_t top_k, int64_t width, T* out);

}  // namespace mok
