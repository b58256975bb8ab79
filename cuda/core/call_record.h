#pragma once

#include <cstdint>

// What the GPU calls of one device have met with, in memory that the host can read at any time.
// The device only adds to the counters; the host remembers what it has told already.
namespace mok {

struct CallRecord {
  uint32_t link_timeouts;    // waits for a rank that were in vain, or ended by another call's rank
  int32_t rank;              // of the last of them: who waited,
  int32_t peer;              // for whom,
  uint64_t expected;         // at which epoch,
  uint64_t seen;             // and which one that rank had shown,
  bool is_other_call;        // or that it makes another call
  uint32_t kernel_timeouts;  // waits within a kernel that expired
  uint32_t out_of_range;     // choices of experts that do not exist
  int32_t experts;           // of the last call with such choices
};

}  // namespace mok
