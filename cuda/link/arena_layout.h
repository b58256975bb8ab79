#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/meeting.h"
#include "core/mx.h"

// What ranks show each other: one arena a rank, of the same layout everywhere.
//
//   flags    [ranks]                 Flag    where each peer stands, shown by each
//   choices  [ranks, tokens, top_k]  4 byte  expert ids of all ranks, or in a backward call their
//                                            router weights, pushed by each
//   x        [tokens, width]         bf16    this rank's tokens, pulled by its peers; or
//            [ranks, tokens, width]          the peers' tokens, pushed by each (the own are
//            unused); or such rows in MXFP8, each with its scales (the own are there, too)
//   dy       as x                    bf16    the output's gradient, only under a gradient
//   rows     [tokens, top_k, width]  bf16    home slots, pushed by the experts' ranks; or
//            [most rows, width]              rows of this rank's experts, pulled by the home ranks;
//                                            under a gradient the larger, for both passes
//   numbers  as rows, without width  f32     the router weights' gradients, likewise
//
// bytes = 24·ranks + 4·ranks·choices + row·(tokens or ranks·tokens) [+ likewise for dy] +
//         2·width·rows [+ 4·rows], each part rounded up to 256,
// with row = 2·width, or of MXFP8 width + width/32 rounded up to 16.
namespace mok {

struct ArenaLayout {
  int32_t ranks = 0;
  int64_t choices = 0;  // tokens * top_k
  int64_t tokens = 0;
  int64_t width = 0;
  bool x_is_pushed = false;
  int64_t rows = 0;
  bool has_gradients = false;
  bool dy_is_pushed = false;
  bool is_mx = false;  // x and dy

  bool operator==(const ArenaLayout&) const = default;

  MOK_HOST_DEVICE static int64_t align(int64_t bytes) { return (bytes + 255) / 256 * 256; }

  // Of a row of x or dy.
  MOK_HOST_DEVICE int64_t token_bytes() const { return is_mx ? mx_row_bytes(width) : 2 * width; }

  MOK_HOST_DEVICE int64_t flags_offset() const { return 0; }
  MOK_HOST_DEVICE int64_t choices_offset() const {
    return flags_offset() + align(int64_t{sizeof(Flag)} * ranks);
  }
  MOK_HOST_DEVICE int64_t x_offset() const { return choices_offset() + align(4 * ranks * choices); }
  MOK_HOST_DEVICE int64_t dy_offset() const { return x_offset() + tokens_bytes(x_is_pushed); }
  MOK_HOST_DEVICE int64_t rows_offset() const {
    return dy_offset() + (has_gradients ? tokens_bytes(dy_is_pushed) : 0);
  }
  MOK_HOST_DEVICE int64_t numbers_offset() const { return rows_offset() + align(2 * rows * width); }
  MOK_HOST_DEVICE int64_t bytes() const {
    return numbers_offset() + (has_gradients ? align(4 * rows) : 0);
  }

 private:
  MOK_HOST_DEVICE int64_t tokens_bytes(bool are_pushed) const {
    return align((are_pushed ? ranks : 1) * tokens * token_bytes());
  }
};

}  // namespace mok
