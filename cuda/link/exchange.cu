#include "link/exchange.h"
#include "link/load_kernels.h"

namespace mok {
namespace {

constexpr int kThreads = 512;
constexpr int kCopyBlocks = 264;
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

__global__ void publish_kernel(char** bases, int32_t rank, ArenaLayout layout, const int32_t* ids,
                               const void* x) {
  const int64_t thread = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t threads = gridDim.x * int64_t{blockDim.x};
  for (int64_t i = thread; i < layout.choices; i += threads) {
    const int32_t id = ids[i];
    for (int32_t peer = 0; peer < layout.ranks; ++peer) {
      reinterpret_cast<int32_t*>(bases[peer] + layout.routes())[rank * layout.choices + i] = id;
    }
  }
  copy(bases[rank] + layout.x(), x, 2 * layout.tokens * layout.width, thread, threads);
}

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ void show(char** bases, int32_t rank, const ArenaLayout& layout, uint32_t value) {
  for (int32_t peer = threadIdx.x; peer < layout.ranks; peer += blockDim.x) {
    uint32_t* const flag = reinterpret_cast<uint32_t*>(bases[peer] + layout.flags()) + rank;
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
  }
}

__global__ void barrier_kernel(char** bases, int32_t rank, ArenaLayout layout, uint32_t* state,
                               uint64_t timeout_ns, const int32_t* kernel_failed, int32_t* failed,
                               CallRecord* record) {
  __shared__ int32_t missing;  // the lowest peer that has not come or has failed
  const bool was_broken = state[kIsBroken] != 0 || *kernel_failed != 0;
  const uint32_t now = state[kEpoch] + 1;
  const uint64_t deadline = nanoseconds() + timeout_ns;
  if (threadIdx.x == 0) {
    missing = layout.ranks;
  }
  __syncthreads();
  show(bases, rank, layout, was_broken ? kBroken : now);
  const auto flag_of = [&](int32_t peer) {
    return reinterpret_cast<const uint32_t*>(bases[rank] + layout.flags()) + peer;
  };
  const auto look = [&](int32_t peer) {
    uint32_t seen;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                 : "=r"(seen)
                 : "l"(flag_of(peer))
                 : "memory");
    return seen;
  };
  const auto has_come = [&](uint32_t seen) {
    return seen != kBroken && static_cast<int32_t>(seen - now) >= 0;
  };
  for (int32_t peer = threadIdx.x; peer < layout.ranks && !was_broken; peer += blockDim.x) {
    uint32_t seen = look(peer);
    while (!has_come(seen) && seen != kBroken && nanoseconds() <= deadline) {
      seen = look(peer);
    }
    if (!has_come(seen)) {
      atomicMin(&missing, peer);
    }
  }
  __syncthreads();
  if (was_broken || missing < layout.ranks) {
    show(bases, rank, layout, kBroken);
    if (threadIdx.x == 0) {
      *failed = 1;
      state[kIsBroken] = 1;
      if (!was_broken) {
        record->rank = rank;
        record->peer = missing;
        record->expected = now;
        record->seen = look(missing);
        __threadfence_system();
      }
      atomicAdd_system(&record->link_timeouts, 1u);
    }
  }
  if (threadIdx.x == 0) {
    state[kEpoch] = now;
  }
}

// Rank after rank from the right neighbour on, so that at any moment the ranks pull from different
// peers.
__global__ void pull_tokens_kernel(char** bases, int32_t rank, ArenaLayout layout, char* received,
                                   int32_t* routes) {
  const int64_t thread = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t threads = gridDim.x * int64_t{blockDim.x};
  copy(routes, bases[rank] + layout.routes(), 4 * layout.ranks * layout.choices, thread, threads);
  const int64_t bytes = 2 * layout.tokens * layout.width;
  for (int32_t step = 1; step < layout.ranks; ++step) {
    const int32_t peer = (rank + step) % layout.ranks;
    copy(received + peer * bytes, bases[peer] + layout.x(), bytes, thread, threads);
  }
}

}  // namespace

cudaError_t publish(const Arena& arena, const ArenaLayout& layout, const int32_t* ids,
                    const void* x, cudaStream_t stream) {
  publish_kernel<<<kCopyBlocks, kThreads, 0, stream>>>(arena.bases, arena.rank, layout, ids, x);
  return cudaGetLastError();
}

cudaError_t barrier(const Arena& arena, const ArenaLayout& layout, uint64_t timeout_ns,
                    const int32_t* kernel_failed, int32_t* failed, CallRecord* record,
                    cudaStream_t stream) {
  barrier_kernel<<<1, kBarrierThreads, 0, stream>>>(arena.bases, arena.rank, layout, arena.state,
                                                    timeout_ns, kernel_failed, failed, record);
  return cudaGetLastError();
}

cudaError_t pull_tokens(const Arena& arena, const ArenaLayout& layout, void* received,
                        int32_t* routes, cudaStream_t stream) {
  pull_tokens_kernel<<<kCopyBlocks, kThreads, 0, stream>>>(arena.bases, arena.rank, layout,
                                                           static_cast<char*>(received), routes);
  return cudaGetLastError();
}

cudaError_t load_exchange() {
  return load_kernels(publish_kernel, barrier_kernel, pull_tokens_kernel);
}

}  // namespace mok
