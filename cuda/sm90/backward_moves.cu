#include "core/plan.h"
#include "device/load_kernels.h"
#include "sm90/backward_moves.h"
#include "sm90/rows.cuh"

namespace mok::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 4 * 132;

struct Call {
  BackwardParams params;
  const int32_t* wave_count;
  int32_t wave;
};

// Calls move(row, slot) for each row of the wave that is not padding; a warp takes a row.
template <typename Move>
__device__ void for_each_row(const Call& call, const Move& move) {
  const BackwardParams& params = call.params;
  if (*params.skip != 0 || call.wave >= *call.wave_count) {
    return;
  }
  const int warp = (blockIdx.x * kThreads + threadIdx.x) / kWarp;
  const int64_t end = int64_t{params.waves[call.wave + 1].first_tile} * kTileRows;
  for (int64_t row = int64_t{params.waves[call.wave].first_tile} * kTileRows + warp; row < end;
       row += kBlocks * kThreads / kWarp) {
    const int32_t slot = params.row_source[row];
    if (slot != kPadding) {
      move(static_cast<int32_t>(row), slot);
    }
  }
}

__device__ void dispatch(const BackwardParams& params, const DispatchedTokens& tokens, int32_t row,
                         int32_t slot) {
  const int32_t token = slot / params.top_k;
  const int32_t rank = token / params.tokens;
  const int64_t in_rank = token - rank * params.tokens;
  const Bits16* from = tokens.own + in_rank * params.hidden;
  if (rank != params.rank) {
    from = tokens.received != nullptr
               ? tokens.received + int64_t{token} * params.hidden
               : reinterpret_cast<const Bits16*>(params.bases[rank] + tokens.offset) +
                     in_rank * params.hidden;
  }
  const int32_t ring_rows = params.shape.work.ring_tiles * kTileRows;
  copy_row(from, place_in({tokens.ring, ring_rows}, row, params.hidden), params.hidden);
}

__global__ void __launch_bounds__(kThreads)
    dispatch_tokens_kernel(const __grid_constant__ Call call, const DispatchedTokens x,
                           const DispatchedTokens dy) {
  for_each_row(call, [&](int32_t row, int32_t slot) {
    dispatch(call.params, x, row, slot);
    dispatch(call.params, dy, row, slot);
  });
}

__global__ void __launch_bounds__(kThreads)
    combine_gradients_kernel(const __grid_constant__ Call call) {
  const BackwardParams& params = call.params;
  for_each_row(call, [&](int32_t row, int32_t slot) {
    copy_row(place_in(params.outputs, row, params.hidden), home_of(params, slot), params.hidden);
  });
}

Call call_of(const WaveMoves& moves) { return {moves.params, moves.wave_count, moves.wave}; }

}  // namespace

cudaError_t dispatch_tokens(const WaveMoves& moves, const DispatchedTokens& x,
                            const DispatchedTokens& dy, cudaStream_t stream) {
  dispatch_tokens_kernel<<<kBlocks, kThreads, 0, stream>>>(call_of(moves), x, dy);
  return cudaGetLastError();
}

cudaError_t combine_gradients(const WaveMoves& moves, cudaStream_t stream) {
  combine_gradients_kernel<<<kBlocks, kThreads, 0, stream>>>(call_of(moves));
  return cudaGetLastError();
}

cudaError_t load_backward_moves() {
  return load_kernels(dispatch_tokens_kernel, combine_gradients_kernel);
}

}  // namespace mok::sm90
