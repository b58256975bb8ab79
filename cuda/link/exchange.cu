#include "device/inject.cuh"
#include "device/load_kernels.h"
#include "device/mx_rows.cuh"
#include "device/warp.cuh"
#include "link/exchange.h"
#include "link/meet.cuh"

namespace mok {
namespace {

constexpr int kThreads = 512;
constexpr int kCopyBlocks = 264;
constexpr int kPublishBlocks = 132;  // one an SM: they have many registers
constexpr int kRoundThreads = 256;
constexpr int kRoundBlocks = 3 * 132;
constexpr int kBarrierThreads = 128;

// A thread has so many loads under way.
template <int kAtOnce>
__device__ void copy(void* to, const void* from, int64_t bytes, int64_t thread, int64_t threads) {
  // Rows are multiples of 16 bytes and arena parts are aligned; a last odd piece goes by words.
  const int64_t vectors = bytes / 16;
  for (int64_t first = thread; first < vectors; first += kAtOnce * threads) {
    uint4 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (const int64_t vector = first + i * threads; vector < vectors) {
        values[i] = static_cast<const uint4*>(from)[vector];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (const int64_t vector = first + i * threads; vector < vectors) {
        static_cast<uint4*>(to)[vector] = values[i];
      }
    }
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
          copy<1>(bases[peer] + to, row, row_bytes, lane, kWarp);
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

// At the end of a kernel that shows something: the last block to come here meets the peers.
__device__ void meet_when_all_is_shown(char** bases, int32_t rank, const ArenaLayout& layout,
                                       uint64_t* missed, const MeetingTerms& terms,
                                       uint32_t* blocks_done) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    is_last = atomicAdd(blocks_done, 1) == gridDim.x - 1;
    __threadfence_system();
  }
  __syncthreads();
  if (is_last) {
    meet(bases, rank, layout, Meeting::kEntry, missed, terms);
  }
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

__global__ void __launch_bounds__(kThreads, 1)
    publish_kernel(char** bases, int32_t rank, ArenaLayout layout, PlanShape plan,
                   Published published, uint64_t* missed, MeetingTerms entry,
                   uint32_t* blocks_done) {
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
      copy<4>(bases[rank] + offset, rows, 2 * layout.tokens * layout.width, thread, threads);
    }
  };
  show_rows(published.x.rows, layout.x_offset(), layout.x_is_pushed);
  if (published.dy.rows != nullptr) {
    show_rows(published.dy.rows, layout.dy_offset(), layout.dy_is_pushed);
  }
  meet_when_all_is_shown(bases, rank, layout, missed, entry, blocks_done);
}

// The same in MXFP8.
__global__ void __launch_bounds__(kRoundThreads, kRoundBlocks / 132)
    publish_rounded_kernel(char** bases, int32_t rank, ArenaLayout layout, PlanShape plan,
                           Published published, uint64_t* missed, MeetingTerms entry,
                           uint32_t* blocks_done) {
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
  meet_when_all_is_shown(bases, rank, layout, missed, entry, blocks_done);
}

__global__ void exit_barrier_kernel(char** bases, int32_t rank, ArenaLayout layout,
                                    uint64_t* missed, MeetingTerms exit) {
  meet(bases, rank, layout, Meeting::kExit, missed, exit);
}

cudaError_t launch_publish(const Arena& arena, const ArenaLayout& layout, const PlanShape& plan,
                           const Published& published, const MeetingTerms& entry,
                           uint32_t* blocks_done, cudaStream_t stream) {
  const auto kernel = layout.is_mx ? publish_rounded_kernel : publish_kernel;
  const int blocks = layout.is_mx ? kRoundBlocks : kPublishBlocks;
  const int threads = layout.is_mx ? kRoundThreads : kThreads;
  kernel<<<blocks, threads, 0, stream>>>(arena.bases, arena.rank, layout, plan, published,
                                         arena.missed, entry, blocks_done);
  return cudaGetLastError();
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
                    const int32_t* ids, const ShownRows& x, const MeetingTerms& entry,
                    uint32_t* blocks_done, cudaStream_t stream) {
  return launch_publish(arena, layout, plan, {ids, ids, nullptr, x, {}}, entry, blocks_done,
                        stream);
}

cudaError_t publish_gradients(const Arena& arena, const ArenaLayout& layout, const PlanShape& plan,
                              const float* weights, const int32_t* slot_rank, const ShownRows& x,
                              const ShownRows& dy, const MeetingTerms& entry, uint32_t* blocks_done,
                              cudaStream_t stream) {
  return launch_publish(arena, layout, plan,
                        {reinterpret_cast<const int32_t*>(weights), nullptr, slot_rank, x, dy},
                        entry, blocks_done, stream);
}

cudaError_t exit_barrier(const Arena& arena, const ArenaLayout& layout, const MeetingTerms& exit,
                         cudaStream_t stream) {
  exit_barrier_kernel<<<1, kBarrierThreads, 0, stream>>>(arena.bases, arena.rank, layout,
                                                         arena.missed, exit);
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
  return load_kernels(publish_kernel, publish_rounded_kernel, exit_barrier_kernel,
                      copy_routes_kernel, mask_routes_kernel);
}

}  // namespace mok
