#pragma once

#include <cstdint>

#include "core/host_device.h"

// What ranks show each other: one arena a rank, of the same layout everywhere.
//
//   flags  [ranks]                 uint32  epoch of the last barrier at which each peer arrived, or
//                                          kBroken
//   routes [ranks, tokens, top_k]  int32   expert ids of all ranks, pushed by each
//   x      [tokens, width]         bf16    this rank's tokens, pulled by its peers
//   slots  [tokens, top_k, width]  bf16    home slots, pushed by the experts' ranks
//
// bytes = 4·ranks + 4·ranks·tokens·top_k + 2·tokens·width·(1 + top_k), each part rounded up to 256.
namespace mok {

// What a rank whose wait has expired shows its peers from then on.
constexpr uint32_t kBroken = 0xffffffff;

struct ArenaLayout {
  int32_t ranks;
  int64_t choices;  // tokens * top_k
  int64_t tokens;
  int64_t width;

  bool operator==(const ArenaLayout&) const = default;

  MOK_HOST_DEVICE static int64_t align(int64_t bytes) { return (bytes + 255) / 256 * 256; }

  MOK_HOST_DEVICE int64_t flags() const { return 0; }
  MOK_HOST_DEVICE int64_t routes() const { return flags() + align(4 * int64_t{ranks}); }
  MOK_HOST_DEVICE int64_t x() const { return routes() + align(4 * ranks * choices); }
  MOK_HOST_DEVICE int64_t slots() const { return x() + align(2 * tokens * width); }
  MOK_HOST_DEVICE int64_t bytes() const { return slots() + align(2 * choices * width); }
};

}  // namespace mok
