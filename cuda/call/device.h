#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "call/export.h"
#include "core/call_record.h"
#include "core/fault.h"

// What all GPU calls of this process share of a device.
namespace mok {

struct Device {
  int clusters = 0;  // of the forward kernel that fit the device at once
  int backward_clusters = 0;
  CallRecord* record = nullptr;  // host-mapped
  CallRecord told{};             // what the host has taken of it
};

// Everything that a device needs before the first launch: kernels are loaded here, because loading
// one while a peer waits has dead-locked others. Returns at once for a device that is ready.
// Returns what went wrong, or nothing.
MOK_EXPORT std::string prepare_device(int32_t ordinal);

// Whether a GPU of this process can reach the memory of another one. It only asks the driver; if
// that does not answer, yes: the set-up of peer memory will say more.
MOK_EXPORT bool can_reach(int32_t ordinal, int32_t peer);

bool is_prepared(int32_t ordinal);

// A device that is prepared.
Device device_of(int32_t ordinal);

// Counts a call that the host launches; a graph that XLA replays is none.
void count_launched_call();
MOK_EXPORT int64_t launched_calls();

// What the GPU calls of this process recorded since the last look.
MOK_EXPORT std::vector<Fault> take_gpu_faults();

}  // namespace mok
