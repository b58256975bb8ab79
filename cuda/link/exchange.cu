#include "device/clock.cuh"
#include "device/inject.cuh"
#include "device/load_kernels.h"
#include "device/mx_rows.cuh"
#include "device/warp.cuh"
#include "link/exchange.h"

namespace mok {
namespace {

constexpr int kThreads = 512;
constexpr int kCopyBlocks = 264;
constexpr int kRoundThreads = 256;
constexpr int kRoundBlocks = 3 * 132;
constexpr int kBarrierThreads = 128;

__device__ void copy(void* to, const void* from, int64_t bytes, int64_t thread, int64_t threads) {
  // Rows are multiples of 16 bytes and arena parts are aligned; a last odd piece goes by words.
  const int64_t vectors = bytes / 16;
  for (int64_t i = thread; i < vectors; i += threads) {
    static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
  }
  for (int64_t i = vectors * 4 + thread; i < bytes / 4; i += threads) {
    static_cast<uint32_t*>(to)[i] = static_cast<const uint32_t*>(from)[i];
  }
}

// What a rank shows the others before a call.
struct Published {
  const int32_t* words;   // [tokens, top_k] for all: expert ids, or the bits of router weights
  const int32_t* ids;     // [tokens, top_k] expert ids; or, if they are null,
  const int32_t* owners;  // their ranks, kMaskedChoice for none
  ShownRows x;
  ShownRows dy;  // of a backward call, else null
};

// The peer to which the k-th of a token's choices sends it: its expert's rank, unless that is the
// token's own or an earlier choice has sent it there. -1 for none.
__device__ int32_t receiver_of(const PlanShape& plan, int32_t rank, const Published& published,
                               int64_t token, int32_t k) {
  const auto owner = [&](int32_t choice) {
    const int64_t place = token * plan.top_k + choice;
    if (published.ids == nullptr) {
      return published.owners[place];
    }
    const int32_t id = published.ids[place];
    return plan.is_expert(id) ? plan.owner(id) : kMaskedChoice;
  };
  const int32_t peer = owner(k);
  if (peer == rank) {
    return -1;
  }
  for (int32_t earlier = 0; earlier < k; ++earlier) {
    if (owner(earlier) == peer) {
      return -1;
    }
  }
  return peer;
}

// Of the rows that `row_of(token)` gives, to where the peers receive them; a warp takes a token,
// its lanes first the choices, then the bytes.
template <typename RowOf>
__device__ void push_tokens(char** bases, int32_t rank, const ArenaLayout& layout,
                            const PlanShape& plan, const Published& published, int64_t row_bytes,
                            const RowOf& row_of, int64_t offset, int64_t warp, int64_t warps) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t token = warp; token < layout.tokens; token += warps) {
    const char* const row = row_of(token);
    const int64_t to = offset + (rank * layout.tokens + token) * row_bytes;
    for (int32_t first = 0; first < plan.top_k; first += kWarp) {
      const int32_t k = first + lane;
      const int32_t receiver = k < plan.top_k ? receiver_of(plan, rank, published, token, k) : -1;
      for (unsigned left = __ballot_sync(kAllLanes, receiver >= 0); left != 0; left &= left - 1) {
        const int32_t peer = __shfl_sync(kAllLanes, receiver, __ffs(left) - 1);
        if (!inject::warp_drops(Hook::kPushToken, peer)) {
          copy(bases[peer] + to, row, row_bytes, lane, kWarp);
        }
      }
    }
  }
}

// Rounds rows to MXFP8, in this rank's arena, and pushes them from there if they are pushed; a warp
// takes a token.
__device__ void show_rounded(char** bases, int32_t rank, const ArenaLayout& layout,
                             const PlanShape& plan, const Published& published,
                             const ShownRows& shown, int64_t offset, bool are_pushed, int64_t warp,
                             int64_t warps) {
  const int64_t row_bytes = layout.token_bytes();
  char* const own = bases[rank] + offset + (are_pushed ? rank * layout.tokens * row_bytes : 0);
  const auto round_token = [&](int64_t token) {
    char* const row = own + token * row_bytes;
    round_row(shown.rows + token * layout.width, static_cast<int32_t>(layout.width), row,
              shown.rounded == nullptr ? nullptr : shown.rounded + token * layout.width);
    return row;
  };
  if (are_pushed) {
    const auto row_of = [&](int64_t token) {
      const char* const row = round_token(token);
      __syncwarp();  // a lane pushes what others have written
      return row;
    };
    push_tokens(bases, rank, layout, plan, published, row_bytes, row_of, offset, warp, warps);
    return;
  }
  for (int64_t token = warp; token < layout.tokens; token += warps) {
    round_token(token);
  }
}

__device__ Flag* flags_of(char* base, const ArenaLayout& layout) {
  return reinterpret_cast<Flag*>(base + layout.flags_offset());
}

__device__ void push_words(char** bases, int32_t rank, const ArenaLayout& layout,
                           const int32_t* words, int64_t thread, int64_t threads) {
  for (int64_t i = thread; i < layout.choices; i += threads) {
    const int32_t word = words[i];
    for (int32_t peer = 0; peer < layout.ranks; ++peer) {
      if (!inject::drops(Hook::kPushChoices, peer)) {
        reinterpret_cast<int32_t*>(bases[peer] +
                                   layout.choices_offset())[rank * layout.choices + i] = word;
      }
    }
  }
}

__global__ void publish_kernel(char** bases, int32_t rank, ArenaLayout layout, PlanShape plan,
                               Published published) {
  const int64_t thread = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t threads = gridDim.x * int64_t{blockDim.x};
  push_words(bases, rank, layout, published.words, thread, threads);
  const auto show_rows = [&](const void* rows, int64_t offset, bool are_pushed) {
    if (are_pushed) {
      const int64_t row_bytes = 2 * layout.width;
      const auto row_of = [&](int64_t token) {
        return static_cast<const char*>(rows) + token * row_bytes;
      };
      push_tokens(bases, rank, layout, plan, published, row_bytes, row_of, offset, thread / kWarp,
                  threads / kWarp);
    } else {
      copy(bases[rank] + offset, rows, 2 * layout.tokens * layout.width, thread, threads);
    }
  };
  show_rows(published.x.rows, layout.x_offset(), layout.x_is_pushed);
  if (published.dy.rows != nullptr) {
    show_rows(published.dy.rows, layout.dy_offset(), layout.dy_is_pushed);
  }
}

// The same in MXFP8.
__global__ void __launch_bounds__(kRoundThreads, kRoundBlocks / 132)
    publish_rounded_kernel(char** bases, int32_t rank, ArenaLayout layout, PlanShape plan,
                           Published published) {
  const int64_t thread = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t threads = gridDim.x * int64_t{blockDim.x};
  push_words(bases, rank, layout, published.words, thread, threads);
  const auto show = [&](const ShownRows& rows, int64_t offset, bool are_pushed) {
    show_rounded(bases, rank, layout, plan, published, rows, offset, are_pushed, thread / kWarp,
                 threads / kWarp);
  };
  show(published.x, layout.x_offset(), layout.x_is_pushed);
  if (published.dy.rows != nullptr) {
    show(published.dy, layout.dy_offset(), layout.dy_is_pushed);
  }
}

cudaError_t launch_publish(const Arena& arena, const ArenaLayout& layout, const PlanShape& plan,
                           const Published& published, cudaStream_t stream) {
  if (layout.is_mx) {
    publish_rounded_kernel<<<kRoundBlocks, kRoundThreads, 0, stream>>>(arena.bases, arena.rank,
                                                                       layout, plan, published);
  } else {
    publish_kernel<<<kCopyBlocks, kThreads, 0, stream>>>(arena.bases, arena.rank, layout, plan,
                                                         published);
  }
  return cudaGetLastError();
}

__device__ void show(char** bases, int32_t rank, const ArenaLayout& layout, uint64_t Flag::* word,
                     uint64_t value) {
  for (int32_t peer = threadIdx.x; peer < layout.ranks; peer += blockDim.x) {
    if (inject::drops(Hook::kFlag, peer)) {
      continue;
    }
    uint64_t* const to = &(flags_of(bases[peer], layout)[rank].*word);
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
  }
}

__device__ uint64_t look(const uint64_t* word) {
  uint64_t seen;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(word) : "memory");
  return seen;
}

// Why calls after a failed one are right, as long as every rank runs every call:
//
// Epochs count barriers, passed or not, so all ranks give a call the same ones. A late rank finds
// that others have failed in the call it comes to, so it fails without a wait and catches up.
//
// Ranks that make different calls find so at the entry, or, if the other is in a later call by
// then, that it has failed.
//
// A rank pushes output rows only after it has passed a call's entry and before it shows the next
// one's. So nobody's slots change before it has come to the entry, done with those of the call
// before; and what a late rank pushes has landed when the others pass the next entry.
//
// Likewise for output rows that are pulled: a rank writes its own only after it has passed an
// entry, to which all have come, done with pulling those of the call before. No third meeting is
// needed. Whoever has not passed the exit may pull rows that are being written, and drops them.
//
// A rank overwrites what peers read during a call, its routes and tokens (in its own arena, or
// pushed to theirs), only after it has seen all at the exit or has shown that it failed. So whoever
// has seen all at the exit, and then sees no failure, knows that every rank has worked with this
// call's tokens and routes alone. A late rank in whose kernel the tokens of a peer's next call
// arrive finds at the exit that this peer has failed: the peer has shown it before it pushed them.
__global__ void barrier_kernel(char** bases, int32_t rank, ArenaLayout layout, Meeting meeting,
                               uint64_t signature, uint64_t* missed, uint64_t timeout_ns,
                               const int32_t* kernel_failed, int32_t* failed, CallRecord* record) {
  __shared__ int32_t missing;    // the lowest peer that has not come or has failed
  __shared__ int32_t elsewhere;  // the lowest peer that has come to another call
  const Flag* const flags = flags_of(bases[rank], layout);
  const uint64_t last = flags[rank].epoch;
  const uint64_t now = next_epoch(meeting, last);
  const uint64_t entry = entry_of(now);
  const uint64_t call = call_at(signature, entry);
  const bool had_failed = *failed != 0 || *kernel_failed != 0;
  const uint64_t deadline = global_nanoseconds() + timeout_ns;
  if (threadIdx.x == 0) {
    missing = elsewhere = layout.ranks;
  }
  __syncthreads();
  if (meeting == Meeting::kEntry) {
    for (int32_t peer = threadIdx.x; peer < layout.ranks; peer += blockDim.x) {
      // In order before the flag that the same thread shows next.
      *static_cast<volatile uint64_t*>(&flags_of(bases[peer], layout)[rank].call) = call;
    }
  }
  if (had_failed) {  // shown first, so that nobody passes who sees this rank come
    show(bases, rank, layout, &Flag::failed, now);
  }
  show(bases, rank, layout, &Flag::epoch, now);
  if (had_failed) {
    return;
  }
  for (int32_t peer = threadIdx.x; peer < layout.ranks; peer += blockDim.x) {
    uint64_t seen = look(&flags[peer].epoch);
    while (seen < now && seen != missed[peer] && global_nanoseconds() <= deadline) {
      seen = look(&flags[peer].epoch);
    }
    if (seen < now) {
      missed[peer] = seen;
      atomicMin(&missing, peer);
    } else if (meeting == Meeting::kEntry && is_other_call(look(&flags[peer].call), call)) {
      atomicMin(&elsewhere, peer);
    }
  }
  __syncthreads();
  for (int32_t peer = threadIdx.x; peer < layout.ranks; peer += blockDim.x) {
    if (has_failed_since(look(&flags[peer].failed), entry)) {
      atomicMin(&missing, peer);
    }
  }
  __syncthreads();
  const bool calls_differ = elsewhere < layout.ranks;
  if (missing == layout.ranks && !calls_differ) {
    return;
  }
  show(bases, rank, layout, &Flag::failed, now);
  if (threadIdx.x == 0) {
    *failed = 1;
    record->rank = rank;
    record->peer = calls_differ ? elsewhere : missing;
    record->expected = now;
    record->seen = look(&flags[record->peer].epoch);
    record->is_other_call = calls_differ;
    __threadfence_system();
    atomicAdd_system(&record->link_timeouts, 1u);
  }
}

__global__ void copy_routes_kernel(char** bases, int32_t rank, ArenaLayout layout,
                                   const int32_t* failed, int32_t* routes) {
  const bool has_failed = *failed != 0;
  const auto* const from = reinterpret_cast<const int32_t*>(bases[rank] + layout.choices_offset());
  const int64_t count = layout.ranks * layout.choices;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += gridDim.x * int64_t{blockDim.x}) {
    routes[i] = has_failed ? kMaskedChoice : from[i];
  }
}

__global__ void mask_routes_kernel(const int32_t* failed, int32_t* routes, int64_t count) {
  if (*failed == 0) {
    return;
  }
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += gridDim.x * int64_t{blockDim.x}) {
    routes[i] = kMaskedChoice;
  }
}

}  // namespace

cudaError_t publish(const Arena& arena, const ArenaLayout& layout, const PlanShape& plan,
                    const int32_t* ids, const ShownRows& x, cudaStream_t stream) {
  return launch_publish(arena, layout, plan, {ids, ids, nullptr, x, {}}, stream);
}

cudaError_t publish_gradients(const Arena& arena, const ArenaLayout& layout, const PlanShape& plan,
                              const float* weights, const int32_t* slot_rank, const ShownRows& x,
                              const ShownRows& dy, cudaStream_t stream) {
  return launch_publish(arena, layout, plan,
                        {reinterpret_cast<const int32_t*>(weights), nullptr, slot_rank, x, dy},
                        stream);
}

cudaError_t barrier(const Arena& arena, const ArenaLayout& layout, Meeting meeting,
                    uint64_t signature, uint64_t timeout_ns, const int32_t* kernel_failed,
                    int32_t* failed, CallRecord* record, cudaStream_t stream) {
  barrier_kernel<<<1, kBarrierThreads, 0, stream>>>(arena.bases, arena.rank, layout, meeting,
                                                    signature, arena.missed, timeout_ns,
                                                    kernel_failed, failed, record);
  return cudaGetLastError();
}

cudaError_t copy_routes(const Arena& arena, const ArenaLayout& layout, const int32_t* failed,
                        int32_t* routes, cudaStream_t stream) {
  copy_routes_kernel<<<kCopyBlocks, kThreads, 0, stream>>>(arena.bases, arena.rank, layout, failed,
                                                           routes);
  return cudaGetLastError();
}

cudaError_t mask_routes_if(const int32_t* failed, int32_t* routes, int64_t count,
                           cudaStream_t stream) {
  mask_routes_kernel<<<kCopyBlocks, kThreads, 0, stream>>>(failed, routes, count);
  return cudaGetLastError();
}

cudaError_t load_exchange() {
  return load_kernels(publish_kernel, publish_rounded_kernel, barrier_kernel, copy_routes_kernel,
                      mask_routes_kernel);
}

}  // namespace mok
