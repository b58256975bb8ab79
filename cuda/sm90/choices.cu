#include "core/plan.h"
#include "device/inject.cuh"
#include "device/load_kernels.h"
#include "sm90/choices.h"

namespace mok::sm90 {
namespace {

constexpr int kThreads = 256;

__device__ float number_of(const ChoicesParams& params, int64_t choice) {
  if (params.slots != nullptr) {
    return params.slots[choice];
  }
  if (params.bases != nullptr) {
    inject::delays(Hook::kPullNumber, params.slot_rank[choice]);
  }
  const float* const rows = params.bases == nullptr
                                ? params.rows
                                : reinterpret_cast<const float*>(
                                      params.bases[params.slot_rank[choice]] + params.rows_offset);
  return rows[params.slot_row[choice]];
}

__global__ void collect_choices_kernel(const ChoicesParams params) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < params.count) {
    params.out[i] = params.slot_rank[i] == kMaskedChoice ? 0.0f : number_of(params, i);
  }
}

}  // namespace

cudaError_t collect_choices(const ChoicesParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((params.count + kThreads - 1) / kThreads);
  collect_choices_kernel<<<blocks, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t load_choices() { return load_kernels(collect_choices_kernel); }

}  // namespace mok::sm90
