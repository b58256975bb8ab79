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
  decltype(&ncclMemAlloc) mem_alloc;
  decltype(&ncclCommWindowRegister) comm_window_register;
  decltype(&ncclMemFree) mem_free;
  decltype(&ncclGetErrorString) get_error_string;
  ncclTeam_t (*team_lsa)(ncclComm_t);  // ranks that can load and store each other's memory
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
        look_up(library, "ncclMemAlloc", &functions.mem_alloc) &&
        look_up(library, "ncclCommWindowRegister", &functions.comm_window_register) &&
        look_up(library, "ncclMemFree", &functions.mem_free) &&
        look_up(library, "ncclGetErrorString", &functions.get_error_string) &&
        look_up(library, "ncclTeamLsa", &functions.team_lsa);
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

const Arena* find_locked(void* communicator, const ArenaLayout& layout) {
  const auto found = arenas().find(communicator);
  if (found == arenas().end()) {
    return nullptr;
  }
  for (const Arena* arena : found->second) {
    if (arena->layout == layout) {
      return arena;
    }
  }
  return nullptr;
}

std::string describe(ncclResult_t result) {
  return std::string("NCCL: ") + nccl()->get_error_string(result);
}

void give_back(Arena* arena) {
  if (arena->own != nullptr) {
    nccl()->mem_free(arena->own);
  }
  cudaFree(arena->bases);
  cudaFree(arena->state);
}

// Memory of a new arena: epochs and flags begin at zero. Returns what went wrong, or nothing.
std::string take_memory(int device, cudaStream_t stream, Arena* arena) {
  cudaError_t status = cudaSetDevice(device);
  if (status == cudaSuccess) {
    void* memory = nullptr;
    if (const ncclResult_t result = nccl()->mem_alloc(&memory, arena->layout.bytes());
        result != ncclSuccess) {
      return describe(result) +
             " (it comes from outside XLA's pool: lower "
             "XLA_PYTHON_CLIENT_MEM_FRACTION)";
    }
    arena->own = static_cast<char*>(memory);
    status = cudaMemsetAsync(memory, 0, arena->layout.bytes(), stream);
  }
  if (status == cudaSuccess) {
    status = cudaMalloc(&arena->bases, sizeof(char*) * arena->layout.ranks);
  }
  if (status == cudaSuccess) {
    status = cudaMalloc(&arena->state, sizeof(uint32_t) * kArenaStates);
  }
  if (status == cudaSuccess) {
    status = cudaMemsetAsync(arena->state, 0, sizeof(uint32_t) * kArenaStates, stream);
  }
  if (status == cudaSuccess) {
    status = cudaStreamSynchronize(stream);
  }
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

// Shows the memory to the peers and finds theirs. Returns what went wrong, or nothing.
std::string join_peers(ncclComm_t comm, cudaStream_t stream, Arena* arena) {
  ncclWindow_t window = nullptr;
  const ncclResult_t result = nccl()->comm_window_register(comm, arena->own, arena->layout.bytes(),
                                                           &window, NCCL_WIN_COLL_SYMMETRIC);
  if (result != ncclSuccess) {
    return describe(result);
  }
  if (window == nullptr) {
    return "the GPUs have no peer-to-peer access to each other's memory";
  }
  // Asked for only now: registration is what makes NCCL find out.
  if (const int near = nccl()->team_lsa(comm).nRanks; near != arena->layout.ranks) {
    return "only " + std::to_string(near) + " of the " + std::to_string(arena->layout.ranks) +
           " ranks of the mesh axis share an NVLink domain: keep the axis inside one";
  }
  find_peers<<<1, 32, 0, stream>>>(window, arena->layout.ranks, arena->bases);
  cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) {
    status = cudaStreamSynchronize(stream);
  }
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

}  // namespace

const Arena* find_arena(void* communicator, const ArenaLayout& layout) {
  const std::lock_guard lock(mutex);
  return find_locked(communicator, layout);
}

const Arena* find_or_make_arena(void* communicator, int device, const ArenaLayout& layout,
                                cudaStream_t stream, std::string* error) {
  if (const Arena* arena = find_arena(communicator, layout)) {
    return arena;
  }
  if (nccl() == nullptr) {
    *error = "libnccl.so.2 is not loaded or older than 2.28";
    return nullptr;
  }
  // Not under the lock: registration waits for the peers, which are threads of this process or not.
  const auto comm = static_cast<ncclComm_t>(communicator);
  auto arena = std::make_unique<Arena>();
  arena->layout = layout;
  std::string problem;
  if (const ncclResult_t result = nccl()->comm_user_rank(comm, &arena->rank);
      result != ncclSuccess) {
    problem = describe(result);
  }
  if (problem.empty()) {
    problem = take_memory(device, stream, arena.get());
  }
  if (problem.empty()) {
    problem = join_peers(comm, stream, arena.get());
  }
  if (!problem.empty()) {
    give_back(arena.get());
    *error = "making an arena of " + std::to_string(layout.bytes()) + " bytes: " + problem;
    return nullptr;
  }
  const std::lock_guard lock(mutex);
  arenas()[communicator].push_back(arena.get());
  return arena.release();
}

}  // namespace mok
