#include "host/weighted_sum.h"

#include <algorithm>
#include <vector>

namespace mok {

template <typename T>
void weighted_sum(const T* slots, const int32_t* slot_rank, const float* weights, int64_t tokens,
                  int64_t top_k, int64_t width, T* out) {
  std::vector<float> sum(width);
  for (int64_t token = 0; token < tokens; ++token) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t choice = token * top_k; choice < (token + 1) * top_k; ++choice) {
      if (slot_rank[choice] == kMaskedChoice) {
        continue;
      }
      const float weight = weights[choice];
      const T* const row = slots + choice * width;
      for (int64_t column = 0; column < width; ++column) {
        sum[column] += weight * to_float(row[column]);
      }
    }
    for (int64_t column = 0; column < width; ++column) {
      out[token * width + column] = from_float<T>(sum[column]);
    }
  }
}

template void weighted_sum(const float*, const int32_t*, const float*, int64_t, int64_t, int64_t,
                           float*);
template void weighted_sum(const BFloat16*, const int32_t*, const float*, int64_t, int64_t, int64_t,
                           BFloat16*);

}  // namespace mok
