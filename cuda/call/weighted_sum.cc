#include "call/weighted_sum.h"

#include "call/launches.h"
#include "sm90/weighted_sum.h"

namespace mok {
namespace {

template <typename T>
cudaError_t sum_slots(const WeightedSumCall& call, cudaStream_t stream) {
  return sm90::weighted_sum_of_slots(static_cast<const T*>(call.slots), call.slot_rank,
                                     call.weights, call.tokens, call.top_k, call.width,
                                     static_cast<T*>(call.out), stream);
}

}  // namespace

std::string launch_weighted_sum_call(const WeightedSumCall& call, cudaStream_t stream) {
  Launches launch;
  launch("weighted sum", (call.is_float32 ? sum_slots<float> : sum_slots<uint16_t>)(call, stream));
  return launch.result();
}

}  // namespace mok
