#pragma once

#include "core/timeline.h"
#include "device/clock.cuh"
#include "sm90/work.h"

// Keeping a timeline: one thread of each role calls these. What is known of an entry lies in memory
// at once, so that no register holds it while products are under way. Nothing is left of the calls
// in a kernel that keeps none.
namespace mok::sm90 {

__device__ inline TimelineEntry* next_entry(const Timeline& timeline, TimelineRole role) {
  const int64_t lane = timeline.lane(blockIdx.x, role);
  const uint32_t count = timeline.counts[lane];
  return count < timeline.capacity ? timeline.entries + lane * timeline.capacity + count : nullptr;
}

template <typename Params>
__device__ void record_begin(const Params& params, TimelineRole role, int32_t tile, int32_t column,
                             int32_t flags) {
  if constexpr (Params::kRecords) {
    if (TimelineEntry* const entry = next_entry(params.timeline, role); entry != nullptr) {
      int32_t sm;
      asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
      *entry = {global_nanoseconds(), 0, 0, tile, column, flags, sm};
    }
  }
}

template <typename Params>
__device__ void record_middle(const Params& params, TimelineRole role) {
  if constexpr (Params::kRecords) {
    if (TimelineEntry* const entry = next_entry(params.timeline, role); entry != nullptr) {
      entry->middle = global_nanoseconds();
    }
  }
}

template <typename Params>
__device__ void record_end(const Params& params, TimelineRole role) {
  if constexpr (Params::kRecords) {
    if (TimelineEntry* const entry = next_entry(params.timeline, role); entry != nullptr) {
      entry->end = global_nanoseconds();
      ++params.timeline.counts[params.timeline.lane(blockIdx.x, role)];
    }
  }
}

}  // namespace mok::sm90
