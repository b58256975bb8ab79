#pragma once

#include <vector>

#include "require.h"
#include "sm90/unit_table.h"

// What the tests of the work lists share.

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
