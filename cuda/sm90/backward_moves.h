#pragma once

#include <cuda_runtime_api.h>

#include "sm90/backward.h"

// The moves of a wave of the backward pass as launches of their own, for the composed path.
namespace mok::sm90 {

// Rows of one kind, a token's each.
struct DispatchedTokens {
  const Bits16* own;       // [tokens, hidden] of this rank
  const Bits16* received;  // [ranks, tokens, hidden] if the peers have pushed theirs; else null,
  int64_t offset;          // and where they lie in the peers' arenas
  Bits16* ring;            // [ring rows, hidden] where the wave's rows go
};

struct WaveMoves {
  const BackwardParams& params;
  const int32_t* wave_count;
  int32_t wave;
};

cudaError_t dispatch_tokens(const WaveMoves& moves, const DispatchedTokens& x,
                            const DispatchedTokens& dy, cudaStream_t stream);

// The same of tokens in MXFP8, all of them from the ranks' arenas.
cudaError_t expand_tokens(const WaveMoves& moves, Bits16* x_ring, Bits16* dy_ring,
                          cudaStream_t stream);

// Rows of dx from the ring of outputs to their home slots.
cudaError_t combine_gradients(const WaveMoves& moves, cudaStream_t stream);

// Loads the kernels onto the current device.
cudaError_t load_backward_moves();

}  // namespace mok::sm90
