#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

// Instructions for which CuTe has no wrapper, or not the variant needed.
namespace mok::sm90 {

// Copies 16 bytes to shared memory past the L1 cache, or zeros if not `present`.
__device__ inline void copy_async_16(void* shared, const void* global, bool present) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"(cute::cast_smem_ptr_to_uint(shared)), "l"(global), "r"(present ? 16 : 0)
               : "memory");
}

// `count` arrivals at once, at a barrier of this block.
__device__ inline void arrive_many(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(cute::cast_smem_ptr_to_uint(barrier)), "r"(count)
               : "memory");
}

// Orders the generic proxy's accesses (ordinary ones) and the async proxy's (TMA, wgmma).
__device__ inline void fence_proxies_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Until all of this thread's bulk stores have been written, not only read from shared memory.
__device__ inline void wait_for_bulk_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ inline uint32_t load_acquire(const uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// 16 bytes that nobody writes during the kernel and nobody will read again.
__device__ inline uint4 load_once(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// Whether the predicate holds for any thread of a warpgroup; `barrier` is a hardware barrier of
// its own.
__device__ inline bool any_of_warpgroup(int barrier, bool predicate) {
  int32_t any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.s32 mine, %2, 0;\n"
      "barrier.cta.red.or.pred any, %1, 128, mine;\n"
      "selp.s32 %0, 1, 0, any;\n"
      "}\n"
      : "=r"(any)
      : "r"(barrier), "r"(static_cast<int32_t>(predicate))
      : "memory");
  return any != 0;
}

__device__ inline void add_release(uint32_t* counter, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" : : "l"(counter), "r"(value) : "memory");
}

}  // namespace mok::sm90
