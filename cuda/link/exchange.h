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

// Returns when all ranks have come; everything that this rank's stream has done before is then
// visible to the others. If one has not come when the time-out expires, or has failed itself, sets
// *failed and adds to the record. An arena in which that has happened stays broken, on all ranks: a
// rank that comes late cannot know what the others have done in the meantime. The same if
// *kernel_failed is set already.
cudaError_t barrier(const Arena& arena, const ArenaLayout& layout, uint64_t timeout_ns,
                    const int32_t* kernel_failed, int32_t* failed, CallRecord* record,
                    cudaStream_t stream);

// Pulls the peers' tokens, received[rank] being [tokens, width] and this rank's own part left
// alone, and takes a copy of all routes, [ranks, tokens, top_k]: whatever a late rank may do to the
// arena, the kernels of this call see one set of routes.
cudaError_t pull_tokens(const Arena& arena, const ArenaLayout& layout, void* received,
                        int32_t* routes, cudaStream_t stream);

// Loads the kernels onto the current device.
cudaError_t load_exchange();

}  // namespace mok
