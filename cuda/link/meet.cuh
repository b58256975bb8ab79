#pragma once

#include "core/meeting.h"
#include "device/clock.cuh"
#include "device/inject.cuh"
#include "link/exchange.h"

// How a block meets the peers at a call's entry or exit.
//
// Why calls after a failed one are right, as long as every rank runs every call:
//
// Epochs count meetings, passed or not, so all ranks give a call the same ones. A late rank finds
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
namespace mok {

__device__ inline Flag* flags_of(char* base, const ArenaLayout& layout) {
  return reinterpret_cast<Flag*>(base + layout.flags_offset());
}

// To all ranks.
__device__ inline void show(const Arena& arena, uint64_t Flag::* word, uint64_t value) {
  for (int32_t peer = threadIdx.x; peer < arena.layout.ranks; peer += blockDim.x) {
    if (inject::drops(Hook::kFlag, peer)) {
      continue;
    }
    uint64_t* const to = &(flags_of(arena.bases[peer], arena.layout)[arena.rank].*word);
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
  }
}

__device__ inline uint64_t look(const uint64_t* word) {
  uint64_t seen;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(word) : "memory");
  return seen;
}

// To be called by all threads of one block.
__device__ inline void meet(const Arena& arena, Meeting meeting, const MeetingTerms& terms) {
  __shared__ int32_t missing;    // the lowest peer that has not come or has failed
  __shared__ int32_t elsewhere;  // the lowest peer that has come to another call
  const ArenaLayout& layout = arena.layout;
  const int32_t rank = arena.rank;
  const Flag* const flags = flags_of(arena.own, layout);
  const uint64_t last = flags[rank].epoch;
  const uint64_t now = next_epoch(meeting, last);
  const uint64_t entry = entry_of(now);
  const uint64_t call = call_at(terms.signature, entry);
  const bool had_failed = *terms.failed != 0 || *terms.kernel_failed != 0;
  const uint64_t deadline = global_nanoseconds() + terms.timeout_ns;
  if (threadIdx.x == 0) {
    missing = elsewhere = layout.ranks;
  }
  __syncthreads();
  if (meeting == Meeting::kEntry) {
    for (int32_t peer = threadIdx.x; peer < layout.ranks; peer += blockDim.x) {
      // In order before the flag that the same thread shows next.
      *static_cast<volatile uint64_t*>(&flags_of(arena.bases[peer], layout)[rank].call) = call;
    }
  }
  if (had_failed) {  // shown first, so that nobody passes who sees this rank come
    show(arena, &Flag::failed, now);
  }
  show(arena, &Flag::epoch, now);
  if (had_failed) {
    return;
  }
  for (int32_t peer = threadIdx.x; peer < layout.ranks; peer += blockDim.x) {
    uint64_t seen = look(&flags[peer].epoch);
    while (seen < now && seen != arena.missed[peer] && global_nanoseconds() <= deadline) {
      seen = look(&flags[peer].epoch);
    }
    if (seen < now) {
      arena.missed[peer] = seen;
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
  show(arena, &Flag::failed, now);
  if (threadIdx.x == 0) {
    CallRecord& record = *terms.record;
    *terms.failed = 1;
    record.rank = rank;
    record.peer = calls_differ ? elsewhere : missing;
    record.expected = now;
    record.seen = look(&flags[record.peer].epoch);
    record.is_other_call = calls_differ;
    __threadfence_system();
    atomicAdd_system(&record.link_timeouts, 1u);
  }
}

}  // namespace mok
