#include "device/inject.cuh"
#include "device/load_kernels.h"
#include "sm90/each_row.cuh"
#include "sm90/move_rows.h"
#include "sm90/rows.cuh"

namespace mok::sm90 {
namespace {

__global__ void __launch_bounds__(kMoveThreads)
    dispatch_kernel(const __grid_constant__ ForwardParams params, const Wave* wave) {
  for_each_row(params.row_source, wave->first_tile, wave->end_tile, [&](int32_t row, int32_t slot) {
    if (params.received == nullptr) {
      inject::warp_delays(Hook::kPullWaveToken, slot / params.choices);
    }
    copy_row(token_of(params, params.x, params.received, params.x_offset, slot),
             place_in(params.dispatched, row, params.hidden), params.hidden);
  });
}

__global__ void __launch_bounds__(kMoveThreads)
    expand_kernel(const __grid_constant__ ForwardParams params, const Wave* wave) {
  const EncodedRows tokens{params.x_offset, params.x_is_pushed};
  for_each_row(params.row_source, wave->first_tile, wave->end_tile, [&](int32_t row, int32_t slot) {
    expand_token(params, tokens, slot, place_in(params.dispatched, row, params.hidden));
  });
}

__global__ void __launch_bounds__(kMoveThreads)
    combine_kernel(const __grid_constant__ ForwardParams params, const Wave* wave) {
  for_each_row(params.row_source, wave->first_tile, wave->end_tile, [&](int32_t row, int32_t slot) {
    if (!inject::warp_drops(Hook::kPushRow, slot / params.choices)) {
      copy_row(place_in(params.outputs, row, params.hidden), home_of(params, slot), params.hidden);
    }
  });
}

}  // namespace

cudaError_t dispatch_rows(const ForwardParams& params, const Wave* wave, cudaStream_t stream) {
  dispatch_kernel<<<kMoveBlocks, kMoveThreads, 0, stream>>>(params, wave);
  return cudaGetLastError();
}

cudaError_t expand_rows(const ForwardParams& params, const Wave* wave, cudaStream_t stream) {
  expand_kernel<<<kMoveBlocks, kMoveThreads, 0, stream>>>(params, wave);
  return cudaGetLastError();
}

cudaError_t combine_rows(const ForwardParams& params, const Wave* wave, cudaStream_t stream) {
  combine_kernel<<<kMoveBlocks, kMoveThreads, 0, stream>>>(params, wave);
  return cudaGetLastError();
}

cudaError_t load_move_rows() {
  return load_kernels(dispatch_kernel, expand_kernel, combine_kernel);
}

}  // namespace mok::sm90
