#include "core/plan.h"
#include "device/load_kernels.h"
#include "sm90/move_rows.h"
#include "sm90/rows.cuh"

namespace mok::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 4 * 132;

// Calls move(row, slot) for each row of the wave that is not padding; a warp takes a row.
template <typename Move>
__device__ void for_each_row(const ForwardParams& params, const Wave& wave, const Move& move) {
  const int warp = (blockIdx.x * kThreads + threadIdx.x) / kWarp;
  const int64_t end = int64_t{wave.end_tile} * kTileRows;
  for (int64_t row = int64_t{wave.first_tile} * kTileRows + warp; row < end;
       row += kBlocks * kThreads / kWarp) {
    const int32_t slot = params.row_source[row];
    if (slot != kPadding) {
      move(static_cast<int32_t>(row), slot);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    dispatch_kernel(const __grid_constant__ ForwardParams params, const Wave* wave) {
  for_each_row(params, *wave, [&](int32_t row, int32_t slot) {
    copy_row(token_of(params, slot), place_in(params.dispatched, row, params.hidden),
             params.hidden);
  });
}

__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ ForwardParams params, const Wave* wave) {
  for_each_row(params, *wave, [&](int32_t row, int32_t slot) {
    copy_row(place_in(params.outputs, row, params.hidden), home_of(params, slot), params.hidden);
  });
}

}  // namespace

cudaError_t dispatch_rows(const ForwardParams& params, const Wave* wave, cudaStream_t stream) {
  dispatch_kernel<<<kBlocks, kThreads, 0, stream>>>(params, wave);
  return cudaGetLastError();
}

cudaError_t combine_rows(const ForwardParams& params, const Wave* wave, cudaStream_t stream) {
  combine_kernel<<<kBlocks, kThreads, 0, stream>>>(params, wave);
  return cudaGetLastError();
}

cudaError_t load_move_rows() { return load_kernels(dispatch_kernel, combine_kernel); }

}  // namespace mok::sm90
