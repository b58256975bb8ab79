#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "link/arena_layout.h"

// The symmetric arena of one communicator on one device: memory that every rank of the communicator
// can address, registered as an NCCL window.
namespace mok {

struct Arena {
  ArenaLayout layout;
  int32_t rank;
  char** bases;     // [ranks] on the device: where each rank's arena begins
  char* own;        // this rank's
  uint32_t* state;  // [kArenaStates] on the device
};

enum ArenaState : int { kEpoch, kIsBroken, kArenaStates };

// The arena of an `ncclComm_t` for calls of one layout: calls of another must not find their parts
// in the same place, since a rank may begin the next call while a peer ends this one. Collective
// when it has to make one: all ranks must ask for the same layouts in the same order, as one
// program does. Waits for the stream then. On failure returns null and says why. Arenas are never
// given back: captured graphs hold their addresses.
const Arena* find_or_make_arena(void* communicator, int device, const ArenaLayout& layout,
                                cudaStream_t stream, std::string* error);

// The arena that `find_or_make_arena` has made, or null.
const Arena* find_arena(void* communicator, const ArenaLayout& layout);

}  // namespace mok
