#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>

#include "device/clock.cuh"
#include "sm90/ptx.cuh"

// Waits that end. A wait gives up when the kernel's deadline has passed; from then on this thread
// does not wait at all, and the kernel runs to its end with the fault word set and worthless
// results. (A trap would cost the context, and makes ptxas ignore the budget of setmaxnreg.)
namespace mok::sm90 {

struct Watch {
  uint64_t deadline;
  bool late = false;

  // Looks at the clock now and then only: reading it takes longer than most waits.
  __device__ void tried(uint32_t times) {
    if (times % 256 == 0) {
      late = global_nanoseconds() > deadline;
    }
  }
};

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

__device__ inline void wait(const Barrier& barrier, uint32_t parity, Watch& watch) {
  for (uint32_t tries = 1; !watch.late && !barrier.try_wait(parity); ++tries) {
    watch.tried(tries);
  }
  asm volatile("" ::: "memory");
}

// Until a counter in global memory has reached `target`.
__device__ inline void wait_for_count(const uint32_t* counter, uint32_t target, Watch& watch) {
  uint32_t value = 0;
  for (uint32_t tries = 1; !watch.late && value < target; ++tries) {
    value = load_acquire(counter);
    watch.tried(tries);
  }
}

}  // namespace mok::sm90
