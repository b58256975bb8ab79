#include "core/plan.h"
#include "device/load_kernels.h"
#include "sm90/choices.h"

namespace mok::sm90 {
namespace {

constexpr int kThreads = 256;

__global__ void copy_unmasked_kernel(const float* values, const int32_t* slot_rank, int64_t count,
                                     float* out) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < count) {
    out[i] = slot_rank[i] == kMaskedChoice ? 0.0f : values[i];
  }
}

}  // namespace

cudaError_t copy_unmasked(const float* values, const int32_t* slot_rank, int64_t count, float* out,
                          cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  copy_unmasked_kernel<<<blocks, kThreads, 0, stream>>>(values, slot_rank, count, out);
  return cudaGetLastError();
}

cudaError_t load_choices() { return load_kernels(copy_unmasked_kernel); }

}  // namespace mok::sm90
