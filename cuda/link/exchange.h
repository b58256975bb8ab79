#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/call_record.h"
#include "link/arena.h"
#include "link/arena_layout.h"

// The kernels by which ranks meet, before and after the big one. Only the barrier waits, with a
// bound; it is one block, so it cannot keep a collective of another library from its SMs.
namespace mok {

// Pushes this rank's routes to all ranks, and shows them its tokens.
cudaError_t publish(const Arena& arena, const ArenaLayout& layout, const int32_t* ids,
                    const void* x, cudaStream_t stream);

// Returns when all ranks have come, or sets *failed and adds to the record after the time-out.
// Everything that this rank's stream has done before is then visible to the others.
cudaError_t barrier(const Arena& arena, const ArenaLayout& layout, uint64_t timeout_ns,
                    int32_t* failed, CallRecord* record, cudaStream_t stream);

// Pulls the peers' tokens: received[rank] is [tokens, width]; this rank's own part is left alone.
cudaError_t pull_tokens(const Arena& arena, const ArenaLayout& layout, void* received,
                        cudaStream_t stream);

// Loads the kernels onto the current device.
cudaError_t load_exchange();

}  // namespace mok
