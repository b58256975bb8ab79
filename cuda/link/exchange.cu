#include "device/inject.cuh"
#include "device/load_kernels.h"
#include "device/mx_rows.cuh"
#include "device/warp.cuh"
#include "link/exchange.h"
#include "link/meet.cuh"

namespace mok {
namespace {

constexpr int kSms = 132;
constexpr int kExitThreads = 128;

// Of the kernel that publishes, by what it publishes; blocks of an SM.
template <bool kIsMx>
constexpr int kThreads = kIsMx ? 256 : 512;
template <bool kIsMx>
constexpr int kBlocks = kIsMx ? 3 : 1;

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

// Pushes this rank's words to all ranks.
__device__ void push_words(const Arena& arena, const int32_t* words, int64_t thread,
                           int64_t threads) {
  const ArenaLayout& layout = arena.layout;
  for (int64_t i = thread; i < layout.choices; i += threads) {
    const int32_t word = words[i];
    for (int32_t peer = 0; peer < layout.ranks; ++peer) {
      if (!inject::drops(Hook::kPushChoices, peer)) {
        auto* const all = reinterpret_cast<int32_t*>(arena.bases[peer] + layout.choices_offset());
        all[arena.rank * layout.choices + i] = word;
      }
    }
  }
}

// Of the rows that `row_of(token)` gives, to where the peers receive them; a warp takes a token,
// its lanes first the choices, then the bytes.
template <typename RowOf>
__device__ void push_tokens(const Arena& arena, const PlanShape& plan, const Published& published,
                            const RowOf& row_of, int64_t offset, int64_t warp, int64_t warps) {
  const int lane = threadIdx.x % kWarp;
  const int64_t tokens = arena.layout.tokens;
  const int64_t row_bytes = arena.layout.token_bytes();
  for (int64_t token = warp; token < tokens; token += warps) {
    const char* const row = row_of(token);
    const int64_t to = offset + (arena.rank * tokens + token) * row_bytes;
    for (int32_t first = 0; first < plan.top_k; first += kWarp) {
      const int32_t k = first + lane;
      const int32_t receiver =
          k < plan.top_k ? receiver_of(plan, arena.rank, published, token, k) : -1;
      for (unsigned left = __ballot_sync(kAllLanes, receiver >= 0); left != 0; left &= left - 1) {
        const int32_t peer = __shfl_sync(kAllLanes, receiver, __ffs(left) - 1);
        if (!inject::warp_drops(Hook::kPushToken, peer)) {
          copy<1>(arena.bases[peer] + to, row, row_bytes, lane, kWarp);
        }
      }
    }
  }
}

__device__ void show_rows(const Arena& arena, const PlanShape& plan, const Published& published,
                          const ShownRows& shown, int64_t offset, bool are_pushed, int64_t thread,
                          int64_t threads) {
  const auto* const rows = reinterpret_cast<const char*>(shown.rows);
  const int64_t row_bytes = arena.layout.token_bytes();
  if (are_pushed) {
    const auto row_of = [&](int64_t token) { return rows + token * row_bytes; };
    push_tokens(arena, plan, published, row_of, offset, thread / kWarp, threads / kWarp);
  } else {
    copy<4>(arena.own + offset, rows, arena.layout.tokens * row_bytes, thread, threads);
  }
}

// Rounds rows to MXFP8, in this rank's arena, and pushes them from there if they are pushed; a warp
// takes a token.
__device__ void show_rounded(const Arena& arena, const PlanShape& plan, const Published& published,
                             const ShownRows& shown, int64_t offset, bool are_pushed,
                             int64_t thread, int64_t threads) {
  const ArenaLayout& layout = arena.layout;
  const int64_t row_bytes = layout.token_bytes();
  const int64_t warp = thread / kWarp;
  const int64_t warps = threads / kWarp;
  char* const own = arena.own + offset + (are_pushed ? arena.rank * layout.tokens * row_bytes : 0);
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
    push_tokens(arena, plan, published, row_of, offset, warp, warps);
    return;
  }
  for (int64_t token = warp; token < layout.tokens; token += warps) {
    round_token(token);
  }
}

// The last block that has shown its part meets the peers.
template <bool kIsMx>
__global__ void __launch_bounds__(kThreads<kIsMx>, kBlocks<kIsMx>)
    publish_kernel(Arena arena, PlanShape plan, Published published, MeetingTerms terms) {
  const ArenaLayout& layout = arena.layout;
  const int64_t thread = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t threads = gridDim.x * int64_t{blockDim.x};
  push_words(arena, published.words, thread, threads);
  const auto show = [&](const ShownRows& rows, int64_t offset, bool are_pushed) {
    if constexpr (kIsMx) {
      show_rounded(arena, plan, published, rows, offset, are_pushed, thread, threads);
    } else {
      show_rows(arena, plan, published, rows, offset, are_pushed, thread, threads);
    }
  };
  show(published.x, layout.x_offset(), layout.x_is_pushed);
  if (published.dy.rows != nullptr) {
    show(published.dy, layout.dy_offset(), layout.dy_is_pushed);
  }

  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    is_last = atomicInc(arena.blocks_done, gridDim.x - 1) == gridDim.x - 1;
    __threadfence_system();
  }
  __syncthreads();
  if (is_last) {
    meet(arena, Meeting::kEntry, terms);
  }
}

__global__ void meet_at_exit_kernel(Arena arena, MeetingTerms terms) {
  meet(arena, Meeting::kExit, terms);
}

template <bool kIsMx>
cudaError_t launch(const Arena& arena, const PlanShape& plan, const Published& published,
                   const MeetingTerms& terms, cudaStream_t stream) {
  publish_kernel<kIsMx>
      <<<kSms * kBlocks<kIsMx>, kThreads<kIsMx>, 0, stream>>>(arena, plan, published, terms);
  return cudaGetLastError();
}

cudaError_t publish(const Arena& arena, const PlanShape& plan, const Published& published,
                    const MeetingTerms& terms, cudaStream_t stream) {
  return (arena.layout.is_mx ? launch<true> : launch<false>)(arena, plan, published, terms, stream);
}

}  // namespace

cudaError_t publish_tokens(const Arena& arena, const PlanShape& plan, const int32_t* ids,
                           const ShownRows& x, const MeetingTerms& terms, cudaStream_t stream) {
  return publish(arena, plan, {ids, ids, nullptr, x, {}}, terms, stream);
}

cudaError_t publish_gradients(const Arena& arena, const PlanShape& plan, const float* weights,
                              const int32_t* slot_rank, const ShownRows& x, const ShownRows& dy,
                              const MeetingTerms& terms, cudaStream_t stream) {
  return publish(arena, plan,
                 {reinterpret_cast<const int32_t*>(weights), nullptr, slot_rank, x, dy}, terms,
                 stream);
}

cudaError_t meet_at_exit(const Arena& arena, const MeetingTerms& terms, cudaStream_t stream) {
  meet_at_exit_kernel<<<1, kExitThreads, 0, stream>>>(arena, terms);
  return cudaGetLastError();
}

cudaError_t load_exchange() {
  return load_kernels(publish_kernel<false>, publish_kernel<true>, meet_at_exit_kernel);
}

}  // namespace mok
