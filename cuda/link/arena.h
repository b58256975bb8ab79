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
  char** bases;      // [ranks] on the device: where each rank's arena begins
  char* own;         // this rank's
  uint64_t* missed;  // [ranks] on the device: epoch at which each peer was last waited for in vain
  uint32_t* blocks_done;  // one, on the device: of the kernel that publishes; zero between calls
  void* window;           // an ncclWindow_t
};

// Makes the arena of an `ncclComm_t` for calls of one layout, unless it exists: calls of another
// layout must not find their parts in the same place, since a rank may begin the next call while a
// peer ends this one. Arenas are never given back: captured graphs hold their addresses.
//
// Collective when it has to make one: all ranks must ask for the same layouts in the same order, as
// one program does. They then all get it or all fail, a rank that cannot even take part saying so
// by its `problem`; waits for the stream. Returns what is wrong, or nothing.
std::string ensure_arena(void* communicator, int device, const ArenaLayout& layout,
                         uint64_t timeout_ns, cudaStream_t stream, std::string problem);

// The arena that `ensure_arena` has made, or null.
const Arena* find_arena(void* communicator, const ArenaLayout& layout);

}  // namespace mok
