#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/host_device.h"
#include "core/meeting.h"

// How ranks agree outside a call that all of them go on, or none. They meet as in a call, at an
// entry and an exit; but who has waited long enough at the exit may give up while another sees the
// last rank come. So they decide in one word that all of them reach: the first to do so at an exit
// decides for all.
namespace mok {

// Where a rank of epoch `last` that sees these flags meets the others next: one that has left
// agreements out joins them in theirs.
inline uint64_t next_agreement(uint64_t last, const std::vector<Flag>& flags) {
  uint64_t entry = next_epoch(Meeting::kEntry, last);
  for (const Flag& flag : flags) {
    entry = std::max(entry, flag.epoch | 1);
  }
  return entry;
}

// The word has the last exit at which has been decided, and the last one at which all go on: a rank
// that went on may decide at the next exit before another one has read what holds at this.
MOK_HOST_DEVICE inline uint64_t decide(uint64_t word, uint32_t exit, bool all_go_on) {
  if (word >> 32 >= exit) {
    return word;
  }
  const uint32_t last = all_go_on ? exit : static_cast<uint32_t>(word);
  return uint64_t{exit} << 32 | last;
}

// Whether all go on that meet at this exit. Nobody goes on at a later one without this rank.
MOK_HOST_DEVICE inline bool all_go_on_at(uint64_t word, uint32_t exit) {
  return static_cast<uint32_t>(word) == exit;
}

}  // namespace mok
