// Sizes of the largest calls: 72 ranks of 131,072 tokens, every choice going to one rank. Whatever
// overflowed would be undefined behaviour, which this build looks for.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

#include "core/plan.h"
#include "sm90/backward_work.h"
#include "sm90/pull_share.h"
#include "units.h"

using namespace mok;
using namespace mok::sm90;

namespace {

constexpr int32_t kRanks = 72;
constexpr int32_t kHidden = 7168;
constexpr int32_t kInner = 2048;
constexpr PlanShape kLargest{kRanks, 131072, 8, 576, kTileRows, 4096};

// All tiles on one expert, or the same on each.
std::vector<std::vector<int>> loads() {
  const auto most = static_cast<int>(kLargest.max_tiles());
  const int experts = kLargest.local_experts();
  std::vector<int> one(experts), all(experts, most / experts);
  one[experts / 2] = most;
  return {one, all};
}

int32_t ring_tiles() { return static_cast<int32_t>(kLargest.tiles(kLargest.choices() * 9 / 8)); }

void check_plan() {
  REQUIRE(kLargest.max_rows() <= std::numeric_limits<int32_t>::max());
  REQUIRE(kLargest.ranks * kLargest.choices() <= std::numeric_limits<int32_t>::max());
  // The last slot's owner and token.
  const int64_t slot = kLargest.ranks * kLargest.choices() - 1;
  REQUIRE(slot / kLargest.choices() == kRanks - 1);
  std::vector<int32_t> rows_of_visit(kRanks, static_cast<int32_t>(kLargest.choices()));
  REQUIRE(pull_position(rows_of_visit.data(), kRanks, kRanks - 1, rows_of_visit[0] - 1) == slot);
}

void check_forward(const std::vector<int>& tiles) {
  const WorkShape shape =
      forward_work_shape(ring_tiles(), static_cast<int32_t>(kLargest.max_tiles()), kHidden, kInner);
  const std::vector<Start> starts = starts_of(shape, tiles);
  const UnitTable table{shape, starts.data(), static_cast<int32_t>(tiles.size())};
  const Units units = starts.back().units;
  const int64_t items = int64_t{units.items(shape.gate_up_columns, shape.cluster)} +
                        units.items(shape.down_columns, shape.cluster);
  int64_t last = 0;
  for (int32_t unit = 0; unit < units.count(); unit += unit + 100 < units.count() ? 97 : 1) {
    table.place_items(unit, 0, 1, [&](int32_t position, const WorkItem& item) {
      REQUIRE(position >= 0 && position < items);
      REQUIRE(item.first_tile >= 0 && item.first_tile < kLargest.max_tiles());
      last = std::max<int64_t>(last, position);
    });
  }
  REQUIRE(last == items - 1);
}

void check_backward(const std::vector<int>& tiles) {
  const BackwardShape shape =
      backward_shape(kCluster, ring_tiles(), static_cast<int32_t>(kLargest.max_tiles()), kHidden,
                     kInner, kGroupUnits);
  const std::vector<Start> starts = starts_of(shape.work, tiles);
  const BackwardTable table{shape, {shape.work, starts.data(), static_cast<int32_t>(tiles.size())}};
  std::vector<BackwardWave> waves;
  Units before{};
  int32_t first_item = 0;
  while (!table.is_end(before)) {
    const Units after = table.end_of_wave(before);
    waves.push_back(table.wave(before, after, 0, first_item));
    first_item = table.ranges_of(waves.back(), after).weights.end;
    REQUIRE(first_item > waves.back().first_item);
    before = after;
  }
  const auto count = static_cast<int32_t>(waves.size());
  REQUIRE(count <= max_backward_waves(kLargest.max_tiles(), kLargest.local_experts(), shape));
  const WorkItem item = table.weight_item(0, count - 1, shape.items_of_expert() - 1);
  REQUIRE(wave_of(item) == count - 1 && product_of(item) == BackwardProduct::kDownWeights);
  waves.push_back({.units = before,
                   .first_tile = 0,
                   .first_item = first_item,
                   .replays = 0,
                   .first_expert = 0,
                   .experts = 0});
  for (int32_t unit = 0; unit < before.count(); unit += 97) {
    table.place_unit(unit, waves.data(), count, 0, 1, [&](int32_t position, const WorkItem&) {
      REQUIRE(position >= 0 && position < first_item);
    });
  }
}

// Every token is some warp's, and one's only; and no warp has much more than the others.
void check_pulls(int32_t ranks, int32_t warps) {
  constexpr int32_t kRows = 300;
  const int32_t apart = peers_apart(ranks - 1, warps);
  REQUIRE(apart >= 1 && apart <= std::min(ranks - 1, warps));
  const int32_t rank = ranks / 2;
  std::vector<int> times(kRows * ranks);
  for (int32_t warp = 0; warp < warps; ++warp) {
    const PullShare share = pull_share(apart, warp, warps);
    int32_t peers = 0;
    for (int32_t source = 0; source < ranks; ++source) {
      if (source != rank && share.has(source, rank, ranks)) {
        ++peers;
        for (int32_t row = share.first; row < kRows; row += share.stride) {
          ++times[row * ranks + source];
        }
      }
    }
    REQUIRE(apart == 1 || 32.0 * peers / share.stride <= 33.0 * (ranks - 1) / warps);
  }
  for (int32_t i = 0; i < kRows * ranks; ++i) {
    REQUIRE(times[i] == (i % ranks == rank ? 0 : 1));
  }
}

}  // namespace

int main() {
  check_plan();
  for (const std::vector<int>& tiles : loads()) {
    check_forward(tiles);
    check_backward(tiles);
  }
  for (int32_t ranks = 2; ranks <= 150; ++ranks) {
    for (const int32_t warps : {2, 132, 148}) {
      check_pulls(ranks, warps);
    }
  }
  std::puts("limits good");
}
