#pragma once

#include <cstdint>

#include "core/host_device.h"

// How ranks know where the others stand. They meet twice a call, before it and after it; epochs
// count these meetings from 1, passed or not, so that all ranks give a call the same ones. Entries
// are odd.
namespace mok {

enum class Meeting { kEntry, kExit };

// What a rank shows the others.
struct Flag {
  uint64_t epoch;   // of the last meeting to which it has come
  uint64_t failed;  // of the last meeting that it has not passed
  uint64_t call;    // which call it makes, and at which entry: see `call_at`
};

// The epoch of the next meeting of a rank that has come to `last`.
MOK_HOST_DEVICE inline uint64_t next_epoch(Meeting meeting, uint64_t last) {
  return meeting == Meeting::kEntry ? (last + 1) | 1 : (last | 1) + 1;
}

// Of the call that a meeting belongs to.
MOK_HOST_DEVICE inline uint64_t entry_of(uint64_t epoch) { return (epoch - 1) | 1; }

// What a rank shows of a call, by its signature, before it comes to the entry.
MOK_HOST_DEVICE inline uint64_t call_at(uint64_t signature, uint64_t entry) {
  return signature << 16 | (entry & 0xffff);
}

// Whether a rank that has come to the same entry makes another call. One that is further says
// nothing of this one, but has failed in it, and has shown so before.
MOK_HOST_DEVICE inline bool is_other_call(uint64_t seen, uint64_t own) {
  return seen != own && ((seen ^ own) & 0xffff) == 0;
}

MOK_HOST_DEVICE inline bool has_failed_since(uint64_t failed, uint64_t entry) {
  return failed >= entry;
}

}  // namespace mok
