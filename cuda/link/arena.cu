#include <dlfcn.h>
#include <nccl.h>
#include <nccl_device.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "link/arena.h"

namespace mok {
namespace {

// NCCL as XLA has loaded it: a second copy would not know XLA's communicators.
struct Nccl {
  decltype(&ncclCommUserRank) comm_user_rank;
  decltype(&ncclCommCount) comm_count;
  decltype(&ncclMemAlloc) mem_alloc;
  decltype(&ncclCommWindowRegister) comm_window_register;
  decltype(&ncclGetErrorString) get_error_string;
};

template <typename Function>
bool look_up(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

const Nccl* nccl() {
  static const Nccl* const loaded = []() -> const Nccl* {
    void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    static Nccl functions;
    const bool complete =
        library != nullptr && look_up(library, "ncclCommUserRank", &functions.comm_user_rank) &&
        look_up(library, "ncclCommCount", &functions.comm_count) &&
        look_up(library, "ncclMemAlloc", &functions.mem_alloc) &&
        look_up(library, "ncclCommWindowRegister", &functions.comm_window_register) &&
        look_up(library, "ncclGetErrorString", &functions.get_error_string);
    return complete ? &functions : nullptr;
  }();
  return loaded;
}

__global__ void find_peers(ncclWindow_t window, int32_t ranks, char** bases) {
  for (int32_t rank = threadIdx.x; rank < ranks; rank += blockDim.x) {
    bases[rank] = static_cast<char*>(ncclGetLsaPointer(window, 0, rank));
  }
}

std::mutex mutex;
std::map<void*, std::vector<Arena*>>& arenas() {
  static auto* const all = new std::map<void*, std::vector<Arena*>>;
  return *all;
}

const Arena* find_locked(void* communicator, int64_t bytes) {
  const auto found = arenas().find(communicator);
  if (found == arenas().end()) {
    return nullptr;
  }
  for (const Arena* arena : found->second) {
    if (arena->bytes >= bytes) {
      return arena;
    }
  }
  return nullptr;
}

std::string describe(ncclResult_t result) {
  return std::string("NCCL: ") + nccl()->get_error_string(result);
}

}  // namespace

const Arena* find_arena(void* communicator, int64_t bytes) {
  const std::lock_guard lock(mutex);
  return find_locked(communicator, bytes);
}

const Arena* find_or_make_arena(void* communicator, int device, int64_t bytes, cudaStream_t stream,
                                std::string* error) {
  if (const Arena* arena = find_arena(communicator, bytes)) {
    return arena;
  }
  if (nccl() == nullptr) {
    *error = "libnccl.so.2 is not loaded or older than 2.28";
    return nullptr;
  }
  // Not under the lock: registration waits for the peers, which are threads of this process or not.
  const auto comm = static_cast<ncclComm_t>(communicator);
  auto arena = std::make_unique<Arena>();
  arena->bytes = bytes;
  void* memory = nullptr;
  ncclWindow_t window = nullptr;
  ncclResult_t result = nccl()->comm_count(comm, &arena->ranks);
  if (result == ncclSuccess) {
    result = nccl()->comm_user_rank(comm, &arena->rank);
  }
  cudaSetDevice(device);
  if (result == ncclSuccess) {
    result = nccl()->mem_alloc(&memory, bytes);
  }
  if (result != ncclSuccess) {
    *error = "an arena of " + std::to_string(bytes) + " bytes: " + describe(result);
    return nullptr;
  }
  // The epochs of a new arena begin at zero, flags too.
  cudaError_t status = cudaMemsetAsync(memory, 0, bytes, stream);
  if (status == cudaSuccess) {
    status = cudaMalloc(&arena->bases, sizeof(char*) * arena->ranks);
  }
  if (status == cudaSuccess) {
    status = cudaMalloc(&arena->epoch, sizeof(uint32_t));
  }
  if (status == cudaSuccess) {
    status = cudaMemsetAsync(arena->epoch, 0, sizeof(uint32_t), stream);
  }
  if (status == cudaSuccess) {
    status = cudaStreamSynchronize(stream);
  }
  if (status == cudaSuccess) {
    result = nccl()->comm_window_register(comm, memory, bytes, &window, NCCL_WIN_COLL_SYMMETRIC);
    if (result != ncclSuccess) {
      *error = "registering an arena of " + std::to_string(bytes) + " bytes: " + describe(result);
      return nullptr;
    }
    find_peers<<<1, 32, 0, stream>>>(window, arena->ranks, arena->bases);
    arena->own = static_cast<char*>(memory);
    status = cudaStreamSynchronize(stream);
  }
  if (status != cudaSuccess) {
    *error = std::string("making an arena: ") + cudaGetErrorString(status);
    return nullptr;
  }
  const std::lock_guard lock(mutex);
  arenas()[communicator].push_back(arena.get());
  return arena.release();
}

}  // namespace mok
