#include "core/plan.h"
#include "device/load_kernels.h"
#include "sm90/finish.h"

namespace mok::sm90 {
namespace {

constexpr uint16_t kNan = 0x7fc0;
constexpr int kThreads = 256;
constexpr int kBlocks = 132;

__global__ void finish_kernel(FinishParams params) {
  const bool kernel_failed = *params.kernel_failed != 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (kernel_failed) {
      atomicAdd_system(&params.record->kernel_timeouts, 1u);
    }
    if (const int32_t choices = params.counts[kOutOfRange]) {
      params.record->experts = params.experts;
      atomicAdd_system(&params.record->out_of_range, static_cast<uint32_t>(choices));
    }
  }
  if (!kernel_failed && *params.link_failed == 0) {
    return;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && params.kept_plan != nullptr) {
    params.kept_plan[0] = kNoPlan;
  }
  for (const FinishParams::Result& result : params.results) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < result.count;
         i += gridDim.x * int64_t{blockDim.x}) {
      result.values[i] = kNan;
    }
  }
}

}  // namespace

cudaError_t finish(const FinishParams& params, cudaStream_t stream) {
  finish_kernel<<<kBlocks, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t load_finish() { return load_kernels(finish_kernel); }

}  // namespace mok::sm90
