#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "call/export.h"
#include "link/arena.h"
#include "link/arena_layout.h"

namespace mok {

// Before a call with peers, on each of them: prepares the device and makes the arena upon an
// `ncclComm_t` that the call will look for, see `ensure_arena`. Returns what is wrong, or nothing.
MOK_EXPORT std::string prepare_peers(void* communicator, int32_t ordinal, const ArenaLayout& layout,
                                     uint64_t timeout_ns, cudaStream_t stream);

// The arena of a call, as `prepare_peers` has made it; null if the layout has one rank. Returns
// what is wrong, or nothing.
std::string find_peers(void* communicator, const ArenaLayout& layout, const Arena** arena);

}  // namespace mok
