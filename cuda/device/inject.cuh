#pragma once

#include <cstdint>

#include "core/injection.h"

#ifdef JAX_MOK_INJECT_FAULTS
#include "device/clock.cuh"
#include "device/injection_setters.h"
#include "device/warp.cuh"
#endif

// Hooks by which tests have one push, one flag or one pull come late or never. Nothing is left of
// them unless JAX_MOK_INJECT_FAULTS is defined.
//
// A dropped flag is that one alone. No flag overtakes a push before it, so a dropped push takes all
// later flags of its rank with it: nobody acknowledges data, and data lost without them would go
// unnoticed, but the memory model has no such thing. A dropped pull is not counted as come; those
// that nobody counts can only be late, since a load without end is a kernel without end.
namespace mok::inject {

#ifdef JAX_MOK_INJECT_FAULTS

namespace {  // of each source file: the device code of two of them shares nothing

__device__ Injection* current;  // null for none

const bool is_listed = list_setter([](Injection* injection) {
  return cudaMemcpyToSymbol(current, &injection, sizeof(injection));
});

__device__ __forceinline__ bool concerns(int32_t peer) {
  return current != nullptr && peer >= 0 && peer != current->rank;
}

// Whether what the calling thread is about to do with a peer is not to happen; returns when it is.
// A negative number is no peer.
[[maybe_unused]] __device__ __forceinline__ bool drops(Hook hook, int32_t peer) {
  if (!concerns(peer)) {
    return false;
  }
  Injection& injection = *current;
  if (hook == Hook::kFlag && injection.took_flags) {
    return true;
  }
  if (hook != injection.hook ||
      atomicAdd(&injection.seen, 1u) - injection.first >= injection.count) {
    return false;
  }
  atomicAdd(&injection.happened, 1u);
  if (injection.drops) {
    if (is_push(hook)) {
      injection.took_flags = true;
    }
    return true;
  }
  for (const uint64_t begin = global_nanoseconds();
       global_nanoseconds() < begin + injection.delay_ns;) {
  }
  return false;
}

// Likewise for what a warp is about to do at once. All lanes call it, each with its peer.
[[maybe_unused]] __device__ __forceinline__ bool warp_drops(Hook hook, int32_t peer) {
  const unsigned lanes = __ballot_sync(kAllLanes, concerns(peer));
  if (lanes == 0) {
    return false;
  }
  const int first = __ffs(lanes) - 1;
  const bool is_dropped = static_cast<int>(threadIdx.x) % kWarp == first && drops(hook, peer);
  return __shfl_sync(kAllLanes, static_cast<int>(is_dropped), first) != 0;
}

// The same where nothing is dropped.
[[maybe_unused]] __device__ __forceinline__ void delays(Hook hook, int32_t peer) {
  static_cast<void>(drops(hook, peer));
}
[[maybe_unused]] __device__ __forceinline__ void warp_delays(Hook hook, int32_t peer) {
  static_cast<void>(warp_drops(hook, peer));
}

}  // namespace

#else

__device__ constexpr bool drops(Hook, int32_t) { return false; }
__device__ constexpr bool warp_drops(Hook, int32_t) { return false; }
__device__ constexpr void delays(Hook, int32_t) {}
__device__ constexpr void warp_delays(Hook, int32_t) {}

#endif

}  // namespace mok::inject
