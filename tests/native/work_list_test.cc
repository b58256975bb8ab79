// The work list against what the forward kernel relies on, for random loads, rings and groupings:
// every tile and column block of each product once; no item before one whose results it reads, or
// whose place in the ring it takes.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "units.h"

using namespace mok::sm90;

namespace {

std::vector<WorkItem> list_work(const UnitTable& table) {
  const WorkShape& shape = table.shape;
  const Units total = table.starts[table.experts].units;
  const int size = total.items(shape.gate_up_columns, shape.cluster) +
                   total.items(shape.down_columns, shape.cluster);
  std::vector<WorkItem> items(size, WorkItem{-1, -1, -1, -1});
  for (int unit = 0; unit < total.count(); ++unit) {
    table.place_items(unit, 0, 1,
                      [&](int position, const WorkItem& item) { items.at(position) = item; });
  }
  return items;
}

void check(const WorkShape& s, const std::vector<int>& tiles, const std::vector<WorkItem>& items) {
  const int total = std::reduce(tiles.begin(), tiles.end());
  std::vector<int> first(2 * total, 1 << 30), last(2 * total, -1);
  std::vector<std::vector<int>> seen(2 * total);
  for (int i = 0; i < (int)items.size(); ++i) {
    REQUIRE(items[i].first_tile >= 0);
    for (int b = 0; b < s.cluster; ++b) {
      const BlockWork w = block_work(items[i], b);
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
    if (t >= s.ring_tiles) REQUIRE(first[2 * t] > last[2 * (t - s.ring_tiles) + 1]);
  }
}

// Waves take all items in order, each those of its own tiles, which fit the ring together.
void check_waves(const UnitTable& table, const std::vector<WorkItem>& items) {
  const int total = table.starts[table.experts].tile;
  const int count = ceil_div(total, table.shape.step_tiles);
  int tile = 0, item = 0;
  for (int i = 0; i < count + 2; ++i) {
    const Wave wave = table.wave(i);
    REQUIRE(wave.first_tile == tile && wave.end_tile >= tile);
    REQUIRE(wave.end_tile - wave.first_tile <= table.shape.ring_tiles);
    REQUIRE(wave.gate_up.begin == item && wave.gate_up.end == wave.down.begin);
    for (const auto& [range, flag] : {std::pair(wave.gate_up, 0), {wave.down, 1}}) {
      REQUIRE((range.begin < range.end) == (wave.first_tile < wave.end_tile));
      for (; item < range.end; ++item) {
        REQUIRE((items[item].flags & WorkItem::kDownFlag) == flag);
        for (int b = 0; b < table.shape.cluster; ++b) {
          const BlockWork w = block_work(items[item], b);
          REQUIRE(w.tile >= wave.first_tile && w.tile + w.tiles <= wave.end_tile);
        }
      }
    }
    tile = wave.end_tile;
    REQUIRE(i < count || wave.first_tile == total);
  }
  REQUIRE(tile == total && item == (int)items.size());
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
    const int most_tiles = total + rng() % 2 * (rng() % 20);
    const int cluster = 1 + rng() % 2;
    const int ring = std::max<int>(2 * cluster, rng() % (total + 20));
    const int hidden = 64 * (1 + rng() % 40), inner = 64 * (1 + rng() % 40);
    const int group_units = 1 + rng() % 10, step_tiles = 1 + rng() % 300;
    for (const bool waves : {false, true}) {
      const WorkShape s =
          waves ? wave_shape(cluster, ring, most_tiles, hidden, inner, group_units)
                : work_shape(cluster, ring, most_tiles, hidden, inner, group_units, step_tiles);
      const auto starts = starts_of(s, tiles);
      const UnitTable table{s, starts.data(), experts};
      const auto items = list_work(table);
      check(s, tiles, items);
      if (waves) check_waves(table, items);
    }
  }
  for (int trial = 0; trial < 10000; ++trial) {
    const int known = rng() % 100, end = rng() % 150;
    const uint32_t missing = rng() % 2 ? 0 : rng() & rng() & rng();
    const int now = tiles_known(known, end, missing);
    REQUIRE(now >= known);
    for (int tile = known; tile < now; ++tile) {
      REQUIRE(tile < end);
      REQUIRE((missing >> (tile - known) & 1) == 0);
    }
    REQUIRE(now >= end || now == known + 32 || (missing >> (now - known) & 1) == 1);
  }
  std::puts("work lists good");
}
