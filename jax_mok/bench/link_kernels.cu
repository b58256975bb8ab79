// How fast rows move between two GPUs, and how fast a signal does: run by jax_mok.bench.link.
//
// A kernel moves `rows` rows of `row_bytes` each, row order[i] of `from` to row order[i] of `to`;
// one of the two is a peer's memory. So it pulls or pushes.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int kWarp = 32;
constexpr int kVectorsInFlight = 4;

// A warp takes a row, 16 bytes a lane at a time.
extern "C" __global__ void move_by_loads(char* to, const char* from, const int* order, int rows,
                                         int row_bytes) {
  const int lane = threadIdx.x % kWarp;
  const int warps = gridDim.x * (blockDim.x / kWarp);
  for (int i = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp; i < rows; i += warps) {
    const u64 offset = static_cast<u64>(order[i]) * row_bytes;
    const uint4* const source = reinterpret_cast<const uint4*>(from + offset);
    uint4* const target = reinterpret_cast<uint4*>(to + offset);
    const int vectors = row_bytes / 16;
    for (int first = lane; first < vectors; first += kWarp * kVectorsInFlight) {
      uint4 values[kVectorsInFlight];
#pragma unroll
      for (int j = 0; j < kVectorsInFlight; ++j) {
        if (first + j * kWarp < vectors) {
          values[j] = source[first + j * kWarp];
        }
      }
#pragma unroll
      for (int j = 0; j < kVectorsInFlight; ++j) {
        if (first + j * kWarp < vectors) {
          target[first + j * kWarp] = values[j];
        }
      }
    }
  }
}

constexpr int kStages = 8;
constexpr int kStageBytes = 16384;

__device__ inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// A copy that has not come after some seconds will not: the kernel then ends as one that failed.
constexpr long long kMostCycles = 1ll << 33;

__device__ inline void wait_for(u64* barrier, u32 parity) {
  u32 done = 0;
  for (const long long begin = clock64(); done == 0;) {
    if (clock64() - begin > kMostCycles) {
      __trap();
    }
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// A thread of each block moves pieces of rows through shared memory by bulk copies.
extern "C" __global__ void move_by_bulk_copies(char* to, const char* from, const int* order,
                                               int rows, int row_bytes) {
  extern __shared__ __align__(128) char stages[];  // [kStages][kStageBytes]
  __shared__ u64 full[kStages];
  if (threadIdx.x != 0) {
    return;
  }
  for (u64& barrier : full) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)));
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  const int pieces = (row_bytes + kStageBytes - 1) / kStageBytes;
  const u64 count = (rows - blockIdx.x + gridDim.x - 1) / gridDim.x * static_cast<u64>(pieces);
  const auto offset_of = [&](u64 index) {
    const u64 row = blockIdx.x + index / pieces * gridDim.x;
    return static_cast<u64>(order[row]) * row_bytes + index % pieces * kStageBytes;
  };
  const auto bytes_of = [&](u64 index) {
    const int left = row_bytes - static_cast<int>(index % pieces) * kStageBytes;
    return static_cast<u32>(left < kStageBytes ? left : kStageBytes);
  };
  const auto load = [&](u64 index) {
    const int stage = index % kStages;
    const u32 barrier = shared_address(&full[stage]);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes_of(index))
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared_address(stages + stage * kStageBytes)),
        "l"(from + offset_of(index)), "r"(bytes_of(index)), "r"(barrier)
        : "memory");
  };
  // Half of the stages are being filled, half emptied.
  constexpr int kAhead = kStages / 2;
  for (u64 index = 0; index < kAhead && index < count; ++index) {
    load(index);
  }
  for (u64 index = 0; index < count; ++index) {
    const int stage = index % kStages;
    wait_for(&full[stage], index / kStages % 2);
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to + offset_of(index)),
        "r"(shared_address(stages + stage * kStageBytes)), "r"(bytes_of(index))
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (index + kAhead < count) {
      // All but the newest kAhead - 1 stores have been read: the stage of the next load among them.
      asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kAhead - 1) : "memory");
      load(index + kAhead);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ inline u32 look(const u32* flag) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ inline void show(u32* flag, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Two GPUs answer each other so many times: each shows numbers in `shown` and waits for them in
// `awaited`. One of the two words is the peer's: a signal that is pushed, or one that is pulled.
// Gives up when the clock has run for `limit` cycles, and counts that in *missed.
extern "C" __global__ void signal(u32* shown, const u32* awaited, int times, int is_first,
                                  long long limit, u32* missed) {
  const long long begin = clock64();
  for (int i = 1; i <= times; ++i) {
    if (is_first) {
      show(shown, i);
    }
    while (look(awaited) < i) {
      if (clock64() - begin > limit) {
        *missed = 1;
        return;
      }
    }
    if (!is_first) {
      show(shown, i);
    }
  }
}
