#pragma once

#include <cstdint>

#include "core/directions.h"
#include "core/host_device.h"

// What ranks show each other: one arena a rank, of the same layout everywhere.
//
//   flags     [ranks]                 Flag    where each peer stands, shown by each
//   routes    [ranks, tokens, top_k]  int32   expert ids of all ranks, pushed by each
// then for a dispatch that pulls, or pushes,
//   x         [tokens, width]         bf16    this rank's tokens, pulled by its peers
//   received  [ranks, tokens, width]  bf16    the peers' tokens, pushed by each; the own are unused
// and for a combine that pushes, or pulls,
//   slots     [tokens, top_k, width]  bf16    home slots, pushed by the experts' ranks
//   outputs   [output_rows, width]    bf16    rows of this rank's experts, pulled by the home ranks
//
// bytes = 16·ranks + 4·ranks·choices + 2·width·(tokens or ranks·tokens) +
//         2·width·(choices or output_rows), each part rounded up to 256.
//
// For a backward call instead, behind the flags:
//   weights    [ranks, tokens, top_k]  f32   router weights of all ranks, pushed by each
//   x          [tokens, width]         bf16  this rank's tokens, pulled by its peers
//   dy         [tokens, width]         bf16  the output's gradient, likewise
//   slots      [tokens, top_k, width]  bf16  home slots of dx, pushed by the experts' ranks
//   d_weights  [tokens, top_k]         f32   the router weights' gradients, likewise
//
// bytes = 16·ranks + 4·ranks·choices + 4·width·tokens + 2·width·choices + 4·choices, likewise.
namespace mok {

// Where a rank stands. Barriers are numbered from 1 by their epoch, two a call: entry, then exit.
struct Flag {
  uint64_t epoch;   // of the last barrier to which it has come
  uint64_t failed;  // of the last barrier that it has not passed
};

struct ArenaLayout {
  int32_t ranks;
  int64_t choices;  // tokens * top_k
  int64_t tokens;
  int64_t width;
  Directions directions;
  int64_t output_rows;  // rows that a rank may have to take; 0 if combine pushes
  bool is_backward = false;

  bool operator==(const ArenaLayout&) const = default;

  MOK_HOST_DEVICE static int64_t align(int64_t bytes) { return (bytes + 255) / 256 * 256; }

  MOK_HOST_DEVICE int64_t flags() const { return 0; }
  // Or weights.
  MOK_HOST_DEVICE int64_t routes() const { return flags() + align(int64_t{sizeof(Flag)} * ranks); }
  // x or received.
  MOK_HOST_DEVICE int64_t dispatch() const { return routes() + align(4 * ranks * choices); }
  MOK_HOST_DEVICE int64_t dy() const { return dispatch() + align(2 * tokens * width); }
  // slots or outputs.
  MOK_HOST_DEVICE int64_t combine() const {
    const int64_t rows = directions.dispatch_push ? ranks * tokens : tokens;
    return (is_backward ? dy() : dispatch()) + align(2 * rows * width);
  }
  MOK_HOST_DEVICE int64_t d_weights() const { return combine() + align(2 * choices * width); }
  MOK_HOST_DEVICE int64_t bytes() const {
    if (is_backward) {
      return d_weights() + align(4 * choices);
    }
    const int64_t rows = directions.combine_push ? choices : output_rows;
    return combine() + align(2 * rows * width);
  }
};

}  // namespace mok
