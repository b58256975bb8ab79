// The work list against what the forward kernel relies on, for random loads, rings and groupings:
// every tile and column block of each product once; no item before one whose results it reads, or
// whose place in the ring it takes.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "sm90/unit_table.h"

using namespace mok::sm90;

#define REQUIRE(condition)                                    \
  do {                                                        \
    if (!(condition)) {                                       \
      std::printf("line %d: not %s\n", __LINE__, #condition); \
      std::exit(1);                                           \
    }                                                         \
  } while (0)

namespace {

std::vector<WorkItem> list_work(const WorkShape& shape, const std::vector<int>& tiles) {
  std::vector<Start> starts;
  Start total{};
  for (int count : tiles) {
    starts.push_back(total);
    total = {total.units + units_of(shape, count), total.tile + count};
  }
  starts.push_back(total);
  const int size = total.units.items(shape.gate_up_columns, shape.cluster) +
                   total.units.items(shape.down_columns, shape.cluster);
  std::vector<WorkItem> items(size, WorkItem{-1, -1, -1, -1});
  const UnitTable table{shape, starts.data(), static_cast<int32_t>(tiles.size())};
  for (int unit = 0; unit < total.units.count(); ++unit) {
    table.place_items(unit, 0, 1,
                      [&](int position, const WorkItem& item) { items.at(position) = item; });
  }
  return items;
}

}  // namespace

int main() {
  std::mt19937 rng(5);
  for (int trial = 0; trial < 4000; ++trial) {
    const int experts = 1 + rng() % 20, most = trial % 3 ? 40 : 5;
    std::vector<int> tiles(experts);
    int total = 0;
    for (int& t : tiles) {
      t = rng() % 4 ? rng() % most : 0;
      total += t;
    }
    const int cluster = 1 + rng() % 2;
    const int ring = std::max<int>(2 * cluster, rng() % (total + 20));
    const WorkShape s = work_shape(cluster, ring, 64 * (1 + rng() % 40), 64 * (1 + rng() % 40),
                                   1 + rng() % 10, 1 + rng() % 300);
    const auto items = list_work(s, tiles);
    std::vector<int> first(2 * total, 1 << 30), last(2 * total, -1);
    std::vector<std::vector<int>> seen(2 * total);
    for (int i = 0; i < (int)items.size(); ++i) {
      REQUIRE(items[i].first_tile >= 0);
      const int parts = parts_of(items[i], s.gate_up_columns, s.down_columns, cluster);
      for (int part = 0; part < parts; ++part)
        for (int b = 0; b < cluster; ++b) {
          const BlockWork w = block_work(items[i], cluster, b, part);
          const int k = w.product == Product::kDown;
          const int columns = s.columns(w.product);
          if (w.column_block >= columns) continue;
          for (int t = w.tile; t < w.tile + w.tiles; ++t) {
            REQUIRE(t < total);
            auto& v = seen[2 * t + k];
            v.resize(columns);
            ++v[w.column_block];
            first[2 * t + k] = std::min(first[2 * t + k], i);
            last[2 * t + k] = std::max(last[2 * t + k], i);
          }
        }
    }
    for (auto& v : seen) {
      REQUIRE(!v.empty());
      for (int n : v) REQUIRE(n == 1);
    }
    for (int t = 0; t < total; ++t) {
      REQUIRE(first[2 * t + 1] > last[2 * t]);
      if (t >= ring) REQUIRE(first[2 * t] > last[2 * (t - ring) + 1]);
    }
  }
  std::puts("work lists good");
}
