#pragma once

#include <cstdint>

#include "core/host_device.h"

// What the experts' side holds of a call: a ring of chunks of canonical rows. Every slot of the
// ring holds one chunk; all slots filled once make a wave. A load larger than the ring takes more
// waves, and a row's place in the ring does not depend on how many.
namespace mok {

struct Ring {
  int64_t ring_rows;   // a multiple of chunk_rows
  int64_t chunk_rows;  // a multiple of the tile

  MOK_HOST_DEVICE int64_t wave(int64_t row) const { return row / ring_rows; }
  MOK_HOST_DEVICE int64_t ring_row(int64_t row) const { return row % ring_rows; }
  MOK_HOST_DEVICE int64_t slot(int64_t row) const { return ring_row(row) / chunk_rows; }
};

}  // namespace mok
