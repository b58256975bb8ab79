#include "device/load_kernels.h"
#include "device/mx_rows.cuh"
#include "sm90/each_row.cuh"
#include "sm90/round_rows.h"

namespace mok::sm90 {
namespace {

__global__ void __launch_bounds__(kMoveThreads)
    round_rows_kernel(const uint16_t* from, uint16_t* to, int64_t rows, int32_t width) {
  const int warp = (blockIdx.x * kMoveThreads + threadIdx.x) / kWarp;
  for (int64_t row = warp; row < rows; row += kMoveBlocks * kMoveThreads / kWarp) {
    round_row(from + row * width, width, /*encoded=*/nullptr, to + row * width);
  }
}

}  // namespace

cudaError_t round_rows(const uint16_t* from, uint16_t* to, int64_t rows, int32_t width,
                       cudaStream_t stream) {
  round_rows_kernel<<<kMoveBlocks, kMoveThreads, 0, stream>>>(from, to, rows, width);
  return cudaGetLastError();
}

cudaError_t load_round_rows() { return load_kernels(round_rows_kernel); }

}  // namespace mok::sm90
