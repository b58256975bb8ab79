#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "sm90/unit_table.h"

// What the tests of the work lists share.

#define REQUIRE(condition)                                    \
  do {                                                        \
    if (!(condition)) {                                       \
      std::printf("line %d: not %s\n", __LINE__, #condition); \
      std::exit(1);                                           \
    }                                                         \
  } while (0)

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
