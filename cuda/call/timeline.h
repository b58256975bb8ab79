#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "call/export.h"
#include "core/timeline.h"

// Timelines that the kernels of a device keep while the caller wants them.
namespace mok {

// From now on the kernels of this device keep one, those that the host launches. Returns what went
// wrong, or nothing.
MOK_EXPORT std::string start_timeline(int32_t ordinal);

// Ends it, waits for the device, and hands out what was recorded since. Returns what went wrong, or
// nothing.
MOK_EXPORT std::string take_timeline(int32_t ordinal, std::vector<TimelineRecord>* records);

// For the kernels to come; without entries, none is kept.
Timeline timeline_of(int32_t ordinal);

}  // namespace mok
