#include "device/inject.cuh"
#include "device/load_kernels.h"
#include "sm90/backward_moves.h"
#include "sm90/each_row.cuh"
#include "sm90/rows.cuh"

namespace mok::sm90 {
namespace {

struct Call {
  BackwardParams params;
  const int32_t* wave_count;
  int32_t wave;
};

template <typename Move>
__device__ void for_each_row_of(const Call& call, const Move& move) {
  const BackwardParams& params = call.params;
  if (*params.skip == 0 && call.wave < *call.wave_count) {
    const BackwardWave* const wave = params.waves + call.wave;
    for_each_row(params.row_source, wave[0].first_tile, wave[1].first_tile, move);
  }
}

__device__ void dispatch(const BackwardParams& params, const DispatchedTokens& tokens, int32_t row,
                         int32_t slot) {
  const int32_t ring_rows = params.shape.work.ring_tiles * kTileRows;
  if (tokens.received == nullptr) {
    inject::warp_delays(Hook::kPullWaveToken, slot / params.choices);
  }
  copy_row(token_of(params, tokens.own, tokens.received, tokens.offset, slot),
           place_in({tokens.ring, ring_rows}, row, params.hidden), params.hidden);
}

__global__ void __launch_bounds__(kMoveThreads)
    dispatch_tokens_kernel(const __grid_constant__ Call call, const DispatchedTokens x,
                           const DispatchedTokens dy) {
  for_each_row_of(call, [&](int32_t row, int32_t slot) {
    dispatch(call.params, x, row, slot);
    dispatch(call.params, dy, row, slot);
  });
}

__global__ void __launch_bounds__(kMoveThreads)
    expand_tokens_kernel(const __grid_constant__ Call call, Bits16* x_ring, Bits16* dy_ring) {
  const BackwardParams& params = call.params;
  const int32_t ring_rows = params.shape.work.ring_tiles * kTileRows;
  for_each_row_of(call, [&](int32_t row, int32_t slot) {
    expand_token(params, {params.x_offset, params.x_is_pushed}, slot,
                 place_in({x_ring, ring_rows}, row, params.hidden));
    expand_token(params, {params.dy_offset, params.dy_is_pushed}, slot,
                 place_in({dy_ring, ring_rows}, row, params.hidden));
  });
}

__global__ void __launch_bounds__(kMoveThreads)
    combine_gradients_kernel(const __grid_constant__ Call call) {
  const BackwardParams& params = call.params;
  for_each_row_of(call, [&](int32_t row, int32_t slot) {
    if (!inject::warp_drops(Hook::kPushRow, slot / params.choices)) {
      copy_row(place_in(params.outputs, row, params.hidden), home_of(params, slot), params.hidden);
    }
  });
}

Call call_of(const WaveMoves& moves) { return {moves.params, moves.wave_count, moves.wave}; }

}  // namespace

cudaError_t dispatch_tokens(const WaveMoves& moves, const DispatchedTokens& x,
                            const DispatchedTokens& dy, cudaStream_t stream) {
  dispatch_tokens_kernel<<<kMoveBlocks, kMoveThreads, 0, stream>>>(call_of(moves), x, dy);
  return cudaGetLastError();
}

cudaError_t expand_tokens(const WaveMoves& moves, Bits16* x_ring, Bits16* dy_ring,
                          cudaStream_t stream) {
  expand_tokens_kernel<<<kMoveBlocks, kMoveThreads, 0, stream>>>(call_of(moves), x_ring, dy_ring);
  return cudaGetLastError();
}

cudaError_t combine_gradients(const WaveMoves& moves, cudaStream_t stream) {
  combine_gradients_kernel<<<kMoveBlocks, kMoveThreads, 0, stream>>>(call_of(moves));
  return cudaGetLastError();
}

cudaError_t load_backward_moves() {
  return load_kernels(dispatch_tokens_kernel, expand_tokens_kernel, combine_gradients_kernel);
}

}  // namespace mok::sm90
