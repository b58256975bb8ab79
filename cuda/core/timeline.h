#pragma once

#include <cstdint>

#include "core/host_device.h"

// The record that a persistent kernel can keep of who did what when: read by the host afterwards.
namespace mok {

// Of the two warpgroups that multiply, the first: they share items.
enum class TimelineRole : int32_t { kSchedule, kPull, kMultiply };
constexpr int32_t kTimelineRoles = 3;

// Times are the GPU's global clock, nanoseconds.
struct TimelineEntry {
  uint64_t begin;
  uint64_t middle;  // of products, when the last one was done and their results could leave
  uint64_t end;
  int32_t tile;    // the first of the item's, or that of the first pulled token's row
  int32_t column;  // column block of the item, or number of tokens that were pulled together
  int32_t flags;   // of the item
  int32_t sm;
};

// An entry as the host hands it on.
struct TimelineRecord {
  TimelineEntry entry;
  int32_t block;
  TimelineRole role;
};

// `capacity` entries for each role of each block, and how many there are; later ones are lost.
// Nothing is recorded if `entries` is null.
struct Timeline {
  TimelineEntry* entries;
  uint32_t* counts;
  uint32_t capacity;

  // Where a role's entries and their number are.
  MOK_HOST_DEVICE int64_t lane(int32_t block, TimelineRole role) const {
    return int64_t{block} * kTimelineRoles + static_cast<int32_t>(role);
  }
};

}  // namespace mok
