#include "rack/rank_work.h"

#include <utility>

#include "host/plan_builder.h"
#include "sm90/unit_table.h"

namespace mok::rack {
namespace {

using sm90::kTileRows;
using sm90::Start;
using sm90::WorkItem;

constexpr int32_t kLanes = 32;

// One rank's plan, with the memory that it lies in.
struct Plan {
  explicit Plan(const PlanShape& shape)
      : row_source(shape.max_rows()),
        pull_order(shape.max_rows()),
        tile_expert(shape.max_tiles()),
        expert_tile(shape.local_experts() + 1),
        expert_rows(shape.local_experts()),
        slot_rank(shape.choices()),
        slot_row(shape.choices()),
        counts(kPlanCounts) {}

  PlanTables tables() {
    return {row_source.data(),  pull_order.data(), tile_expert.data(), expert_tile.data(),
            expert_rows.data(), slot_rank.data(),  slot_row.data(),    counts.data()};
  }

  std::vector<int32_t> row_source, pull_order, tile_expert, expert_tile, expert_rows, slot_rank,
      slot_row, counts;
};

std::vector<WorkItem> list_items(const sm90::WorkShape& shape,
                                 const std::vector<int32_t>& expert_tile) {
  std::vector<Start> starts{{}};
  for (size_t expert = 0; expert + 1 < expert_tile.size(); ++expert) {
    const int32_t tiles = expert_tile[expert + 1] - expert_tile[expert];
    starts.push_back({starts.back().units + units_of(shape, tiles), expert_tile[expert + 1]});
  }
  const sm90::Units units = starts.back().units;
  std::vector<WorkItem> items(units.items(shape.gate_up_columns, shape.cluster) +
                              units.items(shape.down_columns, shape.cluster));
  const sm90::UnitTable table{shape, starts.data(), static_cast<int32_t>(expert_tile.size()) - 1};
  for (int32_t unit = 0; unit < units.count(); ++unit) {
    table.place_items(unit, 0, 1,
                      [&](int32_t position, const WorkItem& item) { items[position] = item; });
  }
  return items;
}

void list_rows(const PlanShape& shape, const Plan& plan, std::span<const int32_t> routes,
               int32_t rank, bool repeats_tokens, RankWork* work) {
  const int32_t tiles = plan.counts[kTiles];
  work->tokens_of_tile.resize(tiles);
  for (int32_t row = 0; row < tiles * kTileRows; ++row) {
    const int32_t tile = row / kTileRows;
    if (row % kTileRows == 0) {
      work->first_homes.push_back(static_cast<int32_t>(work->homes.size()));
    }
    const int32_t slot = plan.row_source[row];
    const auto home = static_cast<int32_t>(slot == kPadding ? -1 : slot / shape.choices());
    const bool is_pulled =
        home >= 0 && home != rank && (repeats_tokens || needs_first(shape, routes.data(), slot));
    work->token_home.push_back(is_pulled ? home : -1);
    work->tokens_of_tile[tile] += is_pulled;
    if (home < 0) {
      continue;
    }
    const bool is_new = static_cast<int32_t>(work->homes.size()) == work->first_homes.back() ||
                        work->homes.back().home != home;
    if (is_new) {
      work->homes.push_back({home, 0});
    }
    ++work->homes.back().rows;
  }
  work->first_homes.push_back(static_cast<int32_t>(work->homes.size()));
  for (const int32_t row : plan.pull_order) {
    if (row != kPadding) {
      work->pull_order.push_back(row);
    }
  }
}

}  // namespace

RankWork work_of(const Sizes& sizes, std::span<const int32_t> routes, int32_t rank,
                 bool repeats_tokens) {
  const PlanShape& shape = sizes.plan;
  std::vector<const int32_t*> of_ranks;
  for (int32_t r = 0; r < shape.ranks; ++r) {
    of_ranks.push_back(routes.data() + r * shape.choices());
  }
  Plan plan(shape);
  const RankTables output{rank, plan.tables()};
  build_plans(shape, of_ranks, std::span(&output, 1));

  RankWork work{};
  work.shape =
      sm90::forward_work_shape(static_cast<int32_t>(sizes.ring_rows / kTileRows),
                               static_cast<int32_t>(shape.max_tiles()), sizes.hidden, sizes.inner);
  work.items = list_items(work.shape, plan.expert_tile);
  list_rows(shape, plan, routes, rank, repeats_tokens, &work);
  const int64_t first = rank * shape.choices();
  for (int64_t choice = first; choice < first + shape.choices(); ++choice) {
    const int32_t id = routes[choice];
    if (shape.is_expert(id) && shape.owner(id) != rank &&
        (repeats_tokens || needs_first(shape, routes.data(), choice))) {
      work.token_targets.push_back(shape.owner(id));
    }
  }
  work.choice_rank = std::move(plan.slot_rank);
  return work;
}

std::vector<std::vector<Pull>> pulls_of(const RankWork& work, PullOrder order, int32_t rank,
                                        int32_t ranks, int32_t warps) {
  std::vector<std::vector<Pull>> pulls(warps);
  if (ranks == 1) {
    return pulls;
  }
  const bool by_peers = order == PullOrder::kPeers;
  const int32_t peers = by_peers ? sm90::peers_apart(ranks - 1, warps) : 1;
  const auto& ordered = work.pull_order;
  const int64_t rows = order == PullOrder::kPlan ? ordered.size() : work.token_home.size();
  for (int32_t warp = 0; warp < warps; ++warp) {
    const sm90::PullShare share = sm90::pull_share(peers, warp, warps);
    int32_t looks = 0;
    for (int64_t first = share.first; first < rows; first += int64_t{share.stride} * kLanes) {
      ++looks;
      bool is_new = true;  // none of these rows' tokens has been found
      for (int32_t lane = 0; lane < kLanes && first + lane * share.stride < rows; ++lane) {
        const int64_t position = first + lane * share.stride;
        const auto row =
            static_cast<int32_t>(order == PullOrder::kPlan ? ordered[position] : position);
        const int32_t home = work.token_home[row];
        if (home >= 0 && (!by_peers || share.has(home, rank, ranks))) {
          if (is_new || pulls[warp].back().count == sm90::kPulledTogether) {
            pulls[warp].push_back({looks, 0, {}});
            looks = 0;
            is_new = false;
          }
          Pull& pull = pulls[warp].back();
          pull.tokens[pull.count++] = {row / kTileRows, home};
        }
      }
    }
  }
  return pulls;
}

}  // namespace mok::rack
