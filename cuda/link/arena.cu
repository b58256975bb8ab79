#include <dlfcn.h>
#include <nccl.h>
#include <nccl_device.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/agreement.h"
#include "core/signature.h"
#include "device/inject.cuh"
#include "link/arena.h"

namespace mok {
namespace {

using Clock = std::chrono::steady_clock;

// Ranks wait so long at least for each other's set-up, in which they take memory and the host runs
// other things: one that gave up on a peer that is merely slow would leave it in the registration.
constexpr std::chrono::nanoseconds kLeastWait = std::chrono::seconds(1);

// NCCL as XLA has loaded it: a second copy would not know XLA's communicators.
struct Nccl {
  decltype(&ncclCommUserRank) comm_user_rank;
  decltype(&ncclMemAlloc) mem_alloc;
  decltype(&ncclCommWindowRegister) comm_window_register;
  decltype(&ncclCommWindowDeregister) comm_window_deregister;
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
        look_up(library, "ncclCommWindowDeregister", &functions.comm_window_deregister) &&
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

// Where the ranks of a communicator agree about something outside a call: an arena of flags, and of
// rank 0's word for decisions, see core/agreement.h.
struct Lobby {
  std::string closed;  // why there is none
  Arena arena{};
  Flag own{};
};

struct Peers {
  Lobby* lobby = nullptr;
  std::vector<const Arena*> arenas;
};

__global__ void show_flag(char** bases, int32_t rank, ArenaLayout layout, Flag flag) {
  for (int32_t peer = threadIdx.x; peer < layout.ranks; peer += blockDim.x) {
    if (inject::drops(Hook::kSetUpFlag, peer)) {
      continue;
    }
    volatile Flag* const to = reinterpret_cast<Flag*>(bases[peer] + layout.flags_offset()) + rank;
    to->failed = flag.failed;
    to->call = flag.call;
    __threadfence_system();
    to->epoch = flag.epoch;
  }
}

// Decides for all ranks unless one has at this exit before; `word` becomes what holds. The lobby's
// choices are rank 0's word. Atomic between GPUs that NVLink connects.
__global__ void decide_for_all(char** bases, ArenaLayout layout, uint32_t exit, bool all_go_on,
                               uint64_t* word) {
  using Word = unsigned long long;
  Word* const shared = reinterpret_cast<Word*>(bases[0] + layout.choices_offset());
  Word held = atomicCAS_system(shared, Word{0}, Word{decide(0, exit, all_go_on)});
  while (decide(held, exit, all_go_on) != held) {
    const Word wanted = decide(held, exit, all_go_on);
    const Word before = atomicCAS_system(shared, held, wanted);
    held = before == held ? wanted : before;
  }
  *word = held;
}

std::mutex mutex;
std::map<void*, Peers>& all_peers() {
  static auto* const all = new std::map<void*, Peers>;
  return *all;
}

std::string describe(ncclResult_t result) {
  return std::string("NCCL: ") + nccl()->get_error_string(result);
}

std::string describe(cudaError_t status) {
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

void give_back(ncclComm_t comm, const Arena& arena) {
  if (arena.window != nullptr) {
    nccl()->comm_window_deregister(comm, static_cast<ncclWindow_t>(arena.window));
  }
  if (arena.own != nullptr) {
    nccl()->mem_free(arena.own);
  }
  cudaFree(arena.bases);
  cudaFree(arena.missed);
  cudaFree(arena.blocks_done);
}

// Memory of a new arena: epochs and flags begin at zero. Returns what went wrong, or nothing.
std::string take_memory(cudaStream_t stream, Arena* arena) {
  const int64_t bytes = arena->layout.bytes();
  size_t free_bytes = 0, total = 0;
  cudaError_t status = cudaMemGetInfo(&free_bytes, &total);
  if (status == cudaSuccess) {
    const std::string advice = "it takes " + std::to_string(bytes) +
                               " bytes outside XLA's pool, where " + std::to_string(free_bytes) +
                               " are free: lower XLA_PYTHON_CLIENT_MEM_FRACTION, use fewer " +
                               "tokens a device, or another MoEConfig";
    if (static_cast<uint64_t>(bytes) > free_bytes) {
      return "out of memory: " + advice;
    }
    void* memory = nullptr;
    if (const ncclResult_t result = nccl()->mem_alloc(&memory, bytes); result != ncclSuccess) {
      return describe(result) + " (" + advice + ")";
    }
    arena->own = static_cast<char*>(memory);
    status = cudaMemsetAsync(memory, 0, bytes, stream);
  }
  if (status == cudaSuccess) {
    status = cudaMalloc(&arena->bases, sizeof(char*) * arena->layout.ranks);
  }
  if (status == cudaSuccess) {
    status = cudaMalloc(&arena->missed, sizeof(uint64_t) * arena->layout.ranks);
  }
  if (status == cudaSuccess) {  // an epoch that no rank ever shows
    status = cudaMemsetAsync(arena->missed, 0xff, sizeof(uint64_t) * arena->layout.ranks, stream);
  }
  if (status == cudaSuccess) {
    status = cudaMalloc(&arena->blocks_done, sizeof(uint32_t));
  }
  if (status == cudaSuccess) {
    status = cudaMemsetAsync(arena->blocks_done, 0, sizeof(uint32_t), stream);
  }
  if (status == cudaSuccess) {
    status = cudaStreamSynchronize(stream);
  }
  return describe(status);
}

// Shows the memory to the peers and finds theirs. Returns what went wrong, or nothing.
std::string join_peers(ncclComm_t comm, cudaStream_t stream, Arena* arena) {
  ncclWindow_t window = nullptr;
  const ncclResult_t result = nccl()->comm_window_register(comm, arena->own, arena->layout.bytes(),
                                                           &window, NCCL_WIN_COLL_SYMMETRIC);
  if (result != ncclSuccess) {
    return describe(result);
  }
  arena->window = window;
  // Where NCCL cannot make one it says success, and gives what kernels must not touch.
  cudaPointerAttributes attributes{};
  const bool on_device = cudaPointerGetAttributes(&attributes, window) == cudaSuccess &&
                         attributes.type == cudaMemoryTypeDevice;
  if (!on_device) {
    return "NCCL offers no access to the peers' memory: the GPUs have no peer-to-peer access, or "
           "NCCL_WIN_ENABLE or NCCL_CUMEM_ENABLE is 0 in the environment; if it cannot be had, use "
           "MoEConfig(composition='collective')";
  }
  // Asked for only now: registration is what makes NCCL find out.
  if (const ncclTeam_t near = nccl()->team_lsa(comm); near.nRanks != arena->layout.ranks) {
    const int first = arena->rank - near.rank * near.stride;
    const int last = first + (near.nRanks - 1) * near.stride;
    return "rank " + std::to_string(arena->rank) + " shares an NVLink domain with ranks " +
           std::to_string(first) + " to " + std::to_string(last) + " only, of the " +
           std::to_string(arena->layout.ranks) + " of the mesh axis: keep the axis inside a " +
           "domain, or use MoEConfig(composition='collective')";
  }
  find_peers<<<1, 32, 0, stream>>>(window, arena->layout.ranks, arena->bases);
  cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) {
    status = cudaStreamSynchronize(stream);
  }
  return describe(status);
}

// The lobby is so small that its memory is not agreed upon: nothing could be agreed upon without.
// Tried once, since the other ranks may have opened it. Returns what went wrong, or nothing.
std::string open_lobby(ncclComm_t comm, int32_t ranks, cudaStream_t stream, Lobby* lobby) {
  lobby->arena.layout.ranks = ranks;
  lobby->arena.layout.choices = sizeof(uint64_t) / sizeof(int32_t);  // the word
  if (const ncclResult_t result = nccl()->comm_user_rank(comm, &lobby->arena.rank);
      result != ncclSuccess) {
    return describe(result);
  }
  std::string problem = take_memory(stream, &lobby->arena);
  if (problem.empty()) {
    problem = join_peers(comm, stream, &lobby->arena);
  }
  if (!problem.empty()) {
    give_back(comm, lobby->arena);
  }
  return problem;
}

cudaError_t show_own(const Lobby& lobby, cudaStream_t stream) {
  const Arena& arena = lobby.arena;
  show_flag<<<1, 32, 0, stream>>>(arena.bases, arena.rank, arena.layout, lobby.own);
  return cudaGetLastError();
}

cudaError_t look(const Lobby& lobby, cudaStream_t stream, std::vector<Flag>* flags) {
  const ArenaLayout& layout = lobby.arena.layout;
  flags->resize(layout.ranks);
  const cudaError_t status =
      cudaMemcpyAsync(flags->data(), lobby.arena.own + layout.flags_offset(),
                      sizeof(Flag) * layout.ranks, cudaMemcpyDeviceToHost, stream);
  return status == cudaSuccess ? cudaStreamSynchronize(stream) : status;
}

cudaError_t settle(const Lobby& lobby, uint32_t exit, cudaStream_t stream, bool* all_go_on) {
  const Arena& arena = lobby.arena;
  uint64_t* const word = arena.missed;  // a lobby has no calls that use it
  uint64_t held = 0;
  decide_for_all<<<1, 1, 0, stream>>>(arena.bases, arena.layout, exit, *all_go_on, word);
  cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) {
    status = cudaMemcpyAsync(&held, word, sizeof(held), cudaMemcpyDeviceToHost, stream);
  }
  if (status == cudaSuccess) {
    status = cudaStreamSynchronize(stream);
  }
  *all_go_on = status == cudaSuccess && all_go_on_at(held, exit);
  return status;
}

uint64_t signature_of(const ArenaLayout& layout) {
  return hash_of({layout.ranks, layout.choices, layout.tokens, layout.width, layout.x_is_pushed,
                  layout.rows, layout.has_gradients, layout.dy_is_pushed});
}

// What keeps a rank that sees these flags from going on, if anything.
std::string trouble(const std::vector<Flag>& flags, uint64_t call, uint64_t entry, uint64_t now) {
  for (size_t rank = 0; rank < flags.size(); ++rank) {
    const std::string who = "rank " + std::to_string(rank);
    if (flags[rank].epoch < now) {
      return who +
             " has not reached the set-up within MoEConfig.timeout_s, which here is at least a "
             "second";
    }
    if (is_other_call(flags[rank].call, call)) {
      return who + " sets up memory for calls of other sizes: all ranks have to run one program";
    }
    if (has_failed_since(flags[rank].failed, entry)) {
      return who + " could not go on: see its error";
    }
  }
  return "";
}

// All ranks go on, or none, with an arena of one layout: returns this rank's problem, or that of
// another, or nothing. As in a call, a rank whose wait has expired at the entry stops those at the
// exit that had passed just then.
//
// The host polls. A collective of NCCL's to which a rank does not come could be ended only by
// ending XLA's communicator, and a kernel that waits can keep a peer of the same process from
// taking its memory.
std::string agree(Lobby* lobby, const ArenaLayout& layout, uint64_t timeout_ns, cudaStream_t stream,
                  std::string problem) {
  cudaGetLastError();  // that of a failed allocation is not the launches'
  Flag* const own = &lobby->own;
  std::vector<Flag> flags;
  cudaError_t status = look(*lobby, stream, &flags);
  // Those with a problem wait too, so that nobody who is merely later takes them for further.
  const uint64_t entry = next_agreement(own->epoch, flags);
  own->call = call_at(signature_of(layout), entry);
  bool together = true;
  for (const uint64_t now : {entry, entry + 1}) {
    own->epoch = now;
    if (!problem.empty()) {
      own->failed = now;
    }
    if (status == cudaSuccess) {
      status = show_own(*lobby, stream);
    }
    const auto deadline = Clock::now() + std::max(std::chrono::nanoseconds(timeout_ns), kLeastWait);
    const auto has_come = [&](const Flag& flag) { return flag.epoch >= now; };
    const auto poll = [&] {
      status = look(*lobby, stream, &flags);
      return status == cudaSuccess && !std::ranges::all_of(flags, has_come);
    };
    while (together && status == cudaSuccess && poll() && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    together = status == cudaSuccess && std::ranges::all_of(flags, has_come);
    if (together) {
      // A copy of flags is not atomic: in the last one a failure may be older than the epoch.
      status = look(*lobby, stream, &flags);
    }
    if (problem.empty()) {
      problem = status == cudaSuccess ? trouble(flags, own->call, entry, now) : describe(status);
    }
  }
  const uint64_t exit = own->epoch;
  if (!problem.empty() && status == cudaSuccess) {
    own->failed = exit;
    status = show_own(*lobby, stream);
  }
  bool all_go_on = problem.empty();
  if (status == cudaSuccess) {
    status = settle(*lobby, static_cast<uint32_t>(exit), stream, &all_go_on);
  }
  if (all_go_on) {
    return "";
  }
  if (problem.empty() && status == cudaSuccess) {
    status = look(*lobby, stream, &flags);
    problem = trouble(flags, own->call, entry, exit);
  }
  if (problem.empty()) {
    problem = status == cudaSuccess ? "another rank could not go on" : describe(status);
  }
  return problem;
}

std::string make_arena(ncclComm_t comm, const ArenaLayout& layout, uint64_t timeout_ns,
                       cudaStream_t stream, std::string problem) {
  Lobby* lobby = nullptr;
  {
    const std::lock_guard lock(mutex);
    lobby = all_peers()[comm].lobby;
  }
  // Not under the lock: what follows waits for the peers, some of them threads of this process.
  if (lobby == nullptr) {
    auto made = std::make_unique<Lobby>();
    made->closed = open_lobby(comm, layout.ranks, stream, made.get());
    const std::lock_guard lock(mutex);
    lobby = all_peers()[comm].lobby = made.release();
  }
  if (!lobby->closed.empty()) {
    return problem.empty() ? lobby->closed : problem;
  }
  auto arena = std::make_unique<Arena>();
  arena->layout = layout;
  arena->rank = lobby->arena.rank;
  if (problem.empty()) {
    problem = take_memory(stream, arena.get());
  }
  problem = agree(lobby, layout, timeout_ns, stream, std::move(problem));
  if (problem.empty()) {  // now all come to the registration, which would wait for them without end
    problem = agree(lobby, layout, timeout_ns, stream, join_peers(comm, stream, arena.get()));
  }
  if (!problem.empty()) {
    give_back(comm, *arena);
    return problem;
  }
  const std::lock_guard lock(mutex);
  all_peers()[comm].arenas.push_back(arena.release());
  return "";
}

}  // namespace

const Arena* find_arena(void* communicator, const ArenaLayout& layout) {
  const std::lock_guard lock(mutex);
  for (const Arena* arena : all_peers()[communicator].arenas) {
    if (arena->layout == layout) {
      return arena;
    }
  }
  return nullptr;
}

std::string ensure_arena(void* communicator, int device, const ArenaLayout& layout,
                         uint64_t timeout_ns, cudaStream_t stream, std::string problem) {
  if (find_arena(communicator, layout) != nullptr) {
    return problem;
  }
  if (nccl() == nullptr) {
    return "libnccl.so.2 is not loaded or older than 2.28";
  }
  if (problem.empty()) {
    problem = describe(cudaSetDevice(device));
  }
  problem = make_arena(static_cast<ncclComm_t>(communicator), layout, timeout_ns, stream,
                       std::move(problem));
  return problem.empty() ? "" : "setting up peer memory: " + problem;
}

}  // namespace mok
