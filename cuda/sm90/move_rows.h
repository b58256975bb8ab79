#pragma once

#include <cuda_runtime_api.h>

#include "sm90/forward.h"

// dispatch and combine of one wave as kernels of their own, around the forward kernel's products.
namespace mok::sm90 {

// Copies the tokens of the wave's rows to `params.dispatched`, peers' from `params.received` if
// that is given, else from their arenas. Padding is left as it is: nobody reads it.
cudaError_t dispatch_rows(const ForwardParams& params, const Wave* wave, cudaStream_t stream);

// The same of tokens in MXFP8, all of them from the ranks' arenas.
cudaError_t expand_rows(const ForwardParams& params, const Wave* wave, cudaStream_t stream);

// Copies the wave's rows from `params.outputs` to their home slots.
cudaError_t combine_rows(const ForwardParams& params, const Wave* wave, cudaStream_t stream);

// Loads the kernels onto the current device.
cudaError_t load_move_rows();

}  // namespace mok::sm90
