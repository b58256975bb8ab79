// The backward kernel's work list against what the kernel relies on, for random loads, rings and
// groupings: every tile and column block of each product over rows once, every block of an expert's
// gradients once in each of its waves; waves one after the other and no larger than the ring, and
// their products in order.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "sm90/backward_work.h"
#include "units.h"

using namespace mok::sm90;

namespace {

// As many blocks of so much as it takes.
bool cover(int blocks, int of, int size) { return blocks * of >= size && (blocks - 1) * of < size; }

}  // namespace

int main() {
  std::mt19937 rng(7);
  for (int trial = 0; trial < 3000; ++trial) {
    const int experts = 1 + rng() % 20, most = trial % 3 ? 40 : 5;
    std::vector<int> tiles(experts);
    for (int& t : tiles) {
      t = rng() % 4 ? rng() % most : 0;
    }
    const int cluster = 1 + rng() % 2;
    const int ring = 2 * cluster + rng() % (trial % 2 ? 12 : 100);
    const int most_tiles = std::reduce(tiles.begin(), tiles.end()) + rng() % 2 * (rng() % 20);
    // Sometimes with more pairs of row tiles than one group has.
    const int hidden = 64 * (1 + rng() % (trial % 8 ? 20 : 80)), inner = 64 * (1 + rng() % 20);
    const BackwardShape shape =
        backward_shape(cluster, ring, most_tiles, hidden, inner, 1 + rng() % 10);
    REQUIRE(cover(shape.replay_columns, 128, inner) && cover(shape.hidden_columns, 256, inner));
    REQUIRE(cover(shape.down_columns, 256, inner) && cover(shape.input_columns, 256, hidden));
    REQUIRE(cover(shape.weight_pairs, 256, hidden));
    const std::vector<Start> starts = starts_of(shape.work, tiles);
    const auto [units, total] = starts.back();
    const int saved = rng() % (total + 10);
    const BackwardTable table{shape, {shape.work, starts.data(), experts}};

    std::vector<BackwardWave> waves;
    int first_item = 0;
    Units before{};
    do {
      const Units after = table.end_of_wave(before);
      REQUIRE(after.count() > before.count() || units.count() == 0);
      waves.push_back(table.wave(before, after, saved, first_item));
      const BackwardRanges ranges = table.ranges_of(waves.back(), after);
      REQUIRE(ranges.replay.begin == first_item && ranges.replay.end == ranges.hidden.begin);
      REQUIRE(ranges.hidden.end == ranges.input.begin);
      REQUIRE(ranges.input.end == ranges.weights.begin);
      REQUIRE((ranges.replay.begin < ranges.replay.end) == (waves.back().replays != 0));
      first_item = ranges.weights.end;
      before = after;
    } while (!table.is_end(before));
    const int count = static_cast<int>(waves.size());
    REQUIRE(count <= max_backward_waves(most_tiles, experts, shape));
    REQUIRE(most_tiles > ring || count == 1);
    waves.push_back({units, total, first_item, 0, experts, 0});
    REQUIRE(waves[0].first_tile == 0);
    int splits = 0;
    for (int w = 0; w < count; ++w) {
      REQUIRE(waves[w + 1].first_tile >= waves[w].first_tile);
      REQUIRE(waves[w + 1].first_tile - waves[w].first_tile <= ring);
      REQUIRE(waves[w].experts >= 0);
      splits += waves[w].experts;
    }
    REQUIRE(splits - experts <= max_splits(most_tiles, shape));

    std::vector<WorkItem> items(first_item, WorkItem{-1, -1, -1, -1});
    const auto place = [&](int position, const WorkItem& item) {
      REQUIRE(items.at(position).flags == -1);
      items[position] = item;
    };
    for (int unit = 0; unit < units.count(); ++unit) {
      table.place_unit(unit, waves.data(), count, 0, 1, place);
    }
    for (int w = 0; w < count; ++w) {
      const int number = waves[w].experts * shape.items_of_expert();
      for (int i = 0; i < number; ++i) {
        place(waves[w + 1].first_item - number + i,
              table.weight_item(waves[w].first_expert + i / shape.items_of_expert(), w,
                                i % shape.items_of_expert()));
      }
    }

    std::map<std::tuple<int, int, int>, int> seen;  // product, tile, column -> times
    std::map<std::tuple<int, int, int, int, int>, int> seen_weights;
    int last_key = -1;
    for (const WorkItem& item : items) {
      const int w = wave_of(item), product = static_cast<int>(product_of(item));
      const bool is_weights = product_of(item) >= BackwardProduct::kGateUpWeights;
      const int key = w * 4 + std::min(product, 3);
      REQUIRE(w >= 0 && w < count);
      REQUIRE(key >= last_key);
      last_key = key;
      if (is_weights) {
        ++seen_weights[{w, item.expert, product, item.first_tile, item.column_block}];
        continue;
      }
      for (int block = 0; block < cluster; ++block) {
        const BlockWork work = block_work(item, block);
        for (int t = work.tile; t < work.tile + work.tiles; ++t) {
          REQUIRE(t >= waves[w].first_tile && t < waves[w + 1].first_tile);
          ++seen[{product, t, work.column_block}];
        }
      }
    }
    for (int w = 0; w < count; ++w) {
      for (int t = waves[w].first_tile; t < waves[w + 1].first_tile; ++t) {
        REQUIRE(t < saved || waves[w].replays);
        for (int product = waves[w].replays ? 0 : 1; product < 3; ++product) {
          const int columns = product == 0   ? shape.replay_columns
                              : product == 1 ? shape.hidden_columns
                                             : shape.input_columns;
          for (int column = 0; column < columns; ++column) {
            REQUIRE((seen[{product, t, column}] == 1));
          }
        }
      }
    }
    // One expert at a time has partial sums, and only one that is larger than a wave.
    int astride = -1;
    bool splits_any = false;
    for (int w = 0; w < count; ++w) {
      const int held = astride;
      astride = -1;
      for (int e = waves[w].first_expert; e < waves[w].first_expert + waves[w].experts; ++e) {
        const int begin = std::max(starts[e].tile, waves[w].first_tile);
        const int end = std::min(starts[e + 1].tile, waves[w + 1].first_tile);
        REQUIRE(begin <= end);
        REQUIRE((begin != starts[e].tile) == (held == e));
        if (end != starts[e + 1].tile) {
          REQUIRE(tiles[e] > ring && (held == -1 || held == e));
          REQUIRE(astride == -1);
          astride = e;
          splits_any = true;
        }
      }
    }
    REQUIRE(astride == -1);
    REQUIRE(splits_any == table.splits_experts());

    for (int e = 0; e < experts; ++e) {
      int of_expert = 0;
      for (int w = 0; w < count; ++w) {
        const bool in_wave =
            e >= waves[w].first_expert && e < waves[w].first_expert + waves[w].experts;
        const bool has_rows =
            starts[e].tile < waves[w + 1].first_tile && starts[e + 1].tile > waves[w].first_tile;
        REQUIRE(in_wave || !has_rows);
        of_expert += in_wave;
        for (int pair = 0; in_wave && pair < shape.weight_pairs; ++pair) {
          for (int column = 0; column < shape.replay_columns; ++column) {
            REQUIRE((seen_weights[{w, e, 3, pair, column}] == 1));
          }
          for (int column = 0; column < shape.down_columns; ++column) {
            REQUIRE((seen_weights[{w, e, 4, pair, column}] == 1));
          }
        }
      }
      REQUIRE(of_expert >= 1);
      REQUIRE(tiles[e] > 0 || of_expert == 1);
    }
  }
  std::puts("backward lists good");
}
