#pragma once

#include <cstdint>

// A fault that a rank's kernels commit on purpose, in a build for tests; see device/inject.cuh.
namespace mok {

// What a rank does to a peer's memory, or tells it.
enum class Hook : int32_t {
  kFlag,           // of a call's entry or exit
  kSetUpFlag,      // of the set-up of an arena
  kPushChoices,    // expert ids or router weights
  kPushToken,      // x or dy
  kPushRow,        // of the output or dx
  kPushNumber,     // a router weight's gradient
  kPullToken,      // x or dy, by the fused kernels, which count what has come
  kPullWaveToken,  // likewise by the composed path
  kPullRow,        // as those that are pushed
  kPullNumber,
};

constexpr bool is_push(Hook hook) {
  return hook == Hook::kPushChoices || hook == Hook::kPushToken || hook == Hook::kPushRow ||
         hook == Hook::kPushNumber;
}

struct Injection {
  Hook hook = Hook::kFlag;
  int32_t rank = 0;       // of the device that has this
  uint32_t first = 0;     // occurrences from this one on, counted from 0 since the injection began,
  uint32_t count = 0;     // so many,
  uint64_t delay_ns = 0;  // come later by this
  bool drops = false;     // or not at all

  // Kept by the kernels.
  uint32_t seen = 0;        // occurrences so far
  uint32_t happened = 0;    // those of them that were delayed or dropped
  bool took_flags = false;  // a push was dropped
};

}  // namespace mok
