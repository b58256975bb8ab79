#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

// The symmetric arena of one communicator on one device: memory that every rank of the communicator
// can address, registered as an NCCL window.
namespace mok {

struct Arena {
  int32_t ranks;
  int32_t rank;
  int64_t bytes;
  char** bases;     // [ranks] on the device: where each rank's arena begins
  char* own;        // this rank's
  uint32_t* epoch;  // on the device: of the last barrier
};

// The arena of an `ncclComm_t`, of at least so many bytes. Collective when it has to make or
// enlarge one: all ranks must ask for the same sizes in the same order, as one program does.
// Earlier, smaller arenas stay, because captured graphs hold their addresses. Waits for the stream
// then. On failure returns null and says why.
const Arena* find_or_make_arena(void* communicator, int device, int64_t bytes, cudaStream_t stream,
                                std::string* error);

// The arena that a call of `find_or_make_arena` with the same sizes has made, or null.
const Arena* find_arena(void* communicator, int64_t bytes);

}  // namespace mok
