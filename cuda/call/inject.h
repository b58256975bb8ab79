#pragma once

#include <cstdint>
#include <string>

#include "call/export.h"
#include "core/injection.h"

// Starting and ending the faults that device/inject.cuh has the kernels commit; only in a build for
// tests.
namespace mok {

// The next calls of a device commit `injection`. `hook` names the one of it, as the enumerator
// without its k, in lower case and with underscores. No call is under way. Graphs that have been
// captured before commit it, too. Returns what is wrong, or nothing.
MOK_EXPORT std::string start_injection(int32_t ordinal, const std::string& hook,
                                       Injection injection);

// Ends it, when the device is done with its calls. Returns how often it has happened.
MOK_EXPORT uint32_t end_injection(int32_t ordinal);
}  // namespace mok
