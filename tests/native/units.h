#pragma once

#include <cstdint>
#include <vector>

#include "core/ring.h"
#include "require.h"
#include "sm90/unit_table.h"

// What the tests of the work lists share.

// A tile's place in a ring of so many, each a chunk.
inline int place_in_ring(int tile, int ring_tiles) {
  constexpr int64_t kRows = mok::sm90::kTileRows;
  return static_cast<int>(mok::Ring{ring_tiles * kRows, kRows}.slot(tile * kRows));
}

// Where experts of so many tiles begin, and where the last one ends.
inline std::vector<mok::sm90::Start> starts_of(const mok::sm90::WorkShape& shape,
                                               const std::vector<int>& tiles) {
  std::vector<mok::sm90::Start> starts;
  mok::sm90::Start total{};
  for (const int count : tiles) {
    starts.push_back(total);
    total = {total.units + mok::sm90::units_of(shape, count), total.tile + count};
  }
  starts.push_back(total);
  return starts;
}
