// The plan that the CPU devices build and the moves of rows that walk it, against their
// definitions, for random and extreme sizes. Every table lies in memory of its own, of its exact
// size, so that the address sanitizer sees what reads or writes past it.
//
// links: host/plan_builder.cc host/transfer.cc
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "core/plan.h"
#include "core/ring.h"
#include "host/plan_builder.h"
#include "host/transfer.h"
#include "require.h"

using namespace mok;

namespace {

constexpr int32_t kUnwritten = -77;
constexpr std::byte kOld{0xa5};

using Table = std::vector<int32_t>;
using Bytes = std::vector<std::byte>;

struct Plan {
  Table row_source, pull_order, tile_expert, expert_tile, expert_rows, slot_rank, slot_row, counts;

  explicit Plan(const PlanShape& shape)
      : row_source(shape.max_rows(), kUnwritten),
        pull_order(shape.max_rows(), kUnwritten),
        tile_expert(shape.max_tiles(), kUnwritten),
        expert_tile(shape.local_experts() + 1, kUnwritten),
        expert_rows(shape.local_experts(), kUnwritten),
        slot_rank(shape.choices(), kUnwritten),
        slot_row(shape.choices(), kUnwritten),
        counts(kPlanCounts, kUnwritten) {}

  PlanTables tables() {
    return {row_source.data(),  pull_order.data(), tile_expert.data(), expert_tile.data(),
            expert_rows.data(), slot_rank.data(),  slot_row.data(),    counts.data()};
  }
  PlanView view() const {
    return {row_source.data(), pull_order.data(), slot_rank.data(), slot_row.data(), counts.data()};
  }
  bool operator==(const Plan&) const = default;
};

// Each chunk's rows, in rounds over the sources that have some left, the right neighbour first.
void define_pull_order(const PlanShape& shape, int32_t rank, Plan& plan) {
  std::ranges::fill(plan.pull_order, kPadding);
  for (int64_t begin = 0; begin < shape.max_rows(); begin += shape.chunk_rows) {
    std::vector<Table> rows_from(shape.ranks);
    for (int64_t row = begin; row < std::min(begin + shape.chunk_rows, shape.max_rows()); ++row) {
      if (plan.row_source[row] != kPadding) {
        rows_from[plan.row_source[row] / shape.choices()].push_back(static_cast<int32_t>(row));
      }
    }
    int64_t position = begin;
    for (size_t round = 0; round < static_cast<size_t>(shape.chunk_rows); ++round) {
      for (int32_t step = 1; step <= shape.ranks; ++step) {
        const Table& rows = rows_from[(rank + step) % shape.ranks];
        if (round < rows.size()) plan.pull_order[position++] = rows[round];
      }
    }
  }
}

std::vector<Plan> define_plans(const PlanShape& shape, const std::vector<Table>& routes) {
  std::vector<Plan> plans(shape.ranks, Plan(shape));
  for (Plan& plan : plans) {
    for (Table* table : {&plan.row_source, &plan.tile_expert, &plan.slot_rank, &plan.slot_row}) {
      std::ranges::fill(*table, -1);
    }
    std::ranges::fill(plan.counts, 0);
  }
  for (int32_t expert = 0; expert < shape.experts; ++expert) {
    const int32_t owner = expert / shape.local_experts(), local = expert % shape.local_experts();
    Plan& plan = plans[owner];
    int32_t& tiles = plan.counts[kTiles];
    plan.expert_tile[local] = tiles;
    int32_t rows = 0;
    for (int32_t source = 0; source < shape.ranks; ++source) {
      for (int64_t choice = 0; choice < shape.choices(); ++choice) {
        if (routes[source][choice] != expert) continue;
        if (rows % shape.tile_rows == 0) plan.tile_expert[tiles + rows / shape.tile_rows] = local;
        const int32_t row = tiles * shape.tile_rows + rows++;
        plan.row_source[row] = static_cast<int32_t>(source * shape.choices() + choice);
        plans[source].slot_rank[choice] = owner;
        plans[source].slot_row[choice] = row;
      }
    }
    plan.expert_rows[local] = rows;
    plan.counts[kRows] += rows;
    tiles += (rows + shape.tile_rows - 1) / shape.tile_rows;
    plan.expert_tile[local + 1] = tiles;
  }
  int32_t most_tiles = 0;
  for (const Plan& plan : plans) most_tiles = std::max(most_tiles, plan.counts[kTiles]);
  for (int32_t rank = 0; rank < shape.ranks; ++rank) {
    define_pull_order(shape, rank, plans[rank]);
    plans[rank].counts[kMostTiles] = most_tiles;
    for (const int32_t id : routes[rank]) {
      plans[rank].counts[kMasked] += id == -1;
      plans[rank].counts[kOutOfRange] += id < -1 || id >= shape.experts;
    }
  }
  return plans;
}

// Of the given ranks only: the collective composition builds one rank's plan, the composed one all.
std::vector<Plan> build(const PlanShape& shape, const std::vector<Table>& routes, int32_t first,
                        int32_t last) {
  std::vector<const int32_t*> pointers;
  for (const Table& ids : routes) pointers.push_back(ids.data());
  std::vector<Plan> plans(last - first, Plan(shape));
  std::vector<RankTables> outputs;
  for (int32_t rank = first; rank < last; ++rank) {
    outputs.push_back({rank, plans[rank - first].tables()});
  }
  build_plans(shape, pointers, outputs);
  return plans;
}

std::vector<Table> draw_routes(const PlanShape& shape, std::mt19937& rng) {
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min(), kMost = -(kLeast + 1);
  const int32_t wild[] = {kMaskedChoice, -2, shape.experts, shape.experts + 1, kLeast, kMost};
  const int skew = rng() % 4, percent_wild = rng() % 3 * 30;
  const int32_t favourite = rng() % shape.experts;
  std::vector<Table> routes(shape.ranks, Table(shape.choices()));
  for (Table& ids : routes) {
    const bool is_silent = rng() % 8 == 0;
    for (int32_t& id : ids) {
      id = skew == 0 ? favourite : rng() % shape.experts;
      if (static_cast<int>(rng() % 100) < percent_wild) id = wild[rng() % std::size(wild)];
      if (is_silent) id = kMaskedChoice;
    }
  }
  return routes;
}

Bytes random_bytes(size_t size, std::mt19937& rng) {
  Bytes bytes(size);
  std::ranges::generate(bytes, [&] { return static_cast<std::byte>(rng()); });
  return bytes;
}

std::span<const std::byte> row_of(const Bytes& rows, int64_t row, size_t row_bytes) {
  return std::span(rows).subspan(row * row_bytes, row_bytes);
}

bool is_filled(std::span<const std::byte> bytes, std::byte value) {
  return std::ranges::all_of(bytes, [=](std::byte byte) { return byte == value; });
}

void check_dispatch(const TransferShape& shape, const std::vector<Plan>& plans, int64_t wave,
                    std::mt19937& rng) {
  std::vector<Bytes> values, pulled, pushed;
  for (int32_t rank = 0; rank < shape.ranks; ++rank) {
    values.push_back(random_bytes(shape.choices / shape.choices_a_row * shape.row_bytes, rng));
    pulled.emplace_back(shape.ring.ring_rows * shape.row_bytes, kOld);
  }
  pushed = pulled;
  const auto move = [&](auto mover, std::vector<Bytes>& rings) {
    std::vector<DispatchSeat> seats;
    std::vector<const DispatchSeat*> pointers;
    for (int32_t rank = 0; rank < shape.ranks; ++rank) {
      seats.push_back({values[rank].data(), rings[rank].data(), plans[rank].view(), wave});
    }
    for (const DispatchSeat& seat : seats) pointers.push_back(&seat);
    for (int32_t rank = 0; rank < shape.ranks; ++rank) mover(shape, pointers, rank);
  };
  move(dispatch_pull, pulled);
  move(dispatch_push, pushed);
  for (int32_t rank = 0; rank < shape.ranks; ++rank) {
    const int64_t rows = int64_t{plans[rank].counts[kTiles]} * shape.tile_rows;
    for (int64_t place = 0; place < shape.ring.ring_rows; ++place) {
      const int64_t row = wave * shape.ring.ring_rows + place;
      REQUIRE(shape.ring.wave(row) == wave && shape.ring.ring_row(row) == place);
      REQUIRE(shape.ring.slot(row) == place / shape.ring.chunk_rows);
      for (const Bytes* ring : {&pulled[rank], &pushed[rank]}) {
        const auto got = row_of(*ring, place, shape.row_bytes);
        if (row >= rows) {
          REQUIRE(is_filled(got, kOld));
        } else if (const int64_t slot = plans[rank].row_source[row]; slot == kPadding) {
          REQUIRE(is_filled(got, std::byte{0}));
        } else {
          const Bytes& home = values[slot / shape.choices];
          const int64_t value = slot % shape.choices / shape.choices_a_row;
          REQUIRE(std::ranges::equal(got, row_of(home, value, shape.row_bytes)));
        }
      }
    }
  }
}

void check_combine(const TransferShape& shape, const std::vector<Plan>& plans, int64_t wave,
                   std::mt19937& rng) {
  std::vector<Bytes> rings, pulled, pushed;
  for (int32_t rank = 0; rank < shape.ranks; ++rank) {
    rings.push_back(random_bytes(shape.ring.ring_rows * shape.row_bytes, rng));
    pulled.emplace_back(shape.choices * shape.row_bytes, kOld);
  }
  pushed = pulled;
  const auto move = [&](auto mover, std::vector<Bytes>& slots) {
    std::vector<CombineSeat> seats;
    std::vector<const CombineSeat*> pointers;
    for (int32_t rank = 0; rank < shape.ranks; ++rank) {
      seats.push_back({rings[rank].data(), slots[rank].data(), plans[rank].view(), wave});
    }
    for (const CombineSeat& seat : seats) pointers.push_back(&seat);
    for (int32_t rank = 0; rank < shape.ranks; ++rank) mover(shape, pointers, rank);
  };
  move(combine_pull, pulled);
  move(combine_push, pushed);
  for (int32_t rank = 0; rank < shape.ranks; ++rank) {
    for (int64_t choice = 0; choice < shape.choices; ++choice) {
      const int32_t owner = plans[rank].slot_rank[choice];
      const int64_t place = plans[rank].slot_row[choice] - wave * shape.ring.ring_rows;
      for (const Bytes* slots : {&pulled[rank], &pushed[rank]}) {
        const auto got = row_of(*slots, choice, shape.row_bytes);
        if (owner == kMaskedChoice || place < 0 || place >= shape.ring.ring_rows) {
          REQUIRE(is_filled(got, kOld));
        } else {
          REQUIRE(std::ranges::equal(got, row_of(rings[owner], place, shape.row_bytes)));
        }
      }
    }
  }
}

void check(const PlanShape& shape, const std::vector<Table>& routes, std::mt19937& rng) {
  const std::vector<Plan> expected = define_plans(shape, routes);
  REQUIRE(build(shape, routes, 0, shape.ranks) == expected);
  const int32_t rank = rng() % shape.ranks;
  REQUIRE(build(shape, routes, rank, rank + 1).front() == expected[rank]);

  const int64_t ring_rows = shape.chunk_rows * (1 + rng() % 3);
  const TransferShape moves{.ranks = shape.ranks,
                            .choices = shape.choices(),
                            .choices_a_row = rng() % 2 ? shape.top_k : 1,
                            .tile_rows = shape.tile_rows,
                            .ring = {ring_rows, shape.chunk_rows},
                            .row_bytes = 1 + rng() % 9};
  const int64_t rows = int64_t{expected[0].counts[kMostTiles]} * shape.tile_rows;
  const int64_t waves = (rows + ring_rows - 1) / ring_rows;
  // The first wave, the last one, and one in which nothing is left.
  for (const int64_t wave : {int64_t{0}, waves - 1, waves}) {
    if (wave < 0) continue;
    check_dispatch(moves, expected, wave, rng);
    check_combine(moves, expected, wave, rng);
  }
}

void check_random_sizes(std::mt19937& rng) {
  int64_t rows = 0;
  for (int trial = 0; trial < 1500; ++trial) {
    const int32_t ranks = 1 + rng() % 9, tile_rows = 1 << (rng() % 8);
    const PlanShape shape{.ranks = ranks,
                          .tokens = static_cast<int64_t>(rng() % 24),
                          .top_k = static_cast<int32_t>(1 + rng() % 9),
                          .experts = ranks * static_cast<int32_t>(1 + rng() % 6),
                          .tile_rows = tile_rows,
                          .chunk_rows = tile_rows * static_cast<int64_t>(1 + rng() % 5)};
    check(shape, draw_routes(shape, rng), rng);
    rows += shape.max_rows();
  }
  REQUIRE(rows > 500000);
}

void check_large_sizes(std::mt19937& rng) {
  for (const PlanShape& shape : {
           PlanShape{2, 20000, 3, 2, 64, 4096},  // much for few
           PlanShape{1, 1, 1, 4096, 64, 64},     // nearly all experts empty
           PlanShape{128, 2, 1, 128, 64, 64},    // many ranks
           PlanShape{3, 5, 200, 6, 4, 8},        // more choices than experts
       }) {
    std::vector<Table> routes(shape.ranks, Table(shape.choices()));
    for (Table& ids : routes) std::ranges::fill(ids, shape.experts - 1);
    check(shape, routes, rng);
    check(shape, draw_routes(shape, rng), rng);
  }
}

// Sizes whose tables no test can hold: what is computed of them does not overflow.
void check_sizes_at_the_limit(std::mt19937& rng) {
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  for (int trial = 0; trial < 100000; ++trial) {
    const int32_t ranks = 1 + rng() % 1024, top_k = 1 + rng() % 64;
    const int64_t tokens = kMostRows / ranks / top_k;
    const int32_t local_experts = 1 + rng() % 4096, tile_rows = 1 << (rng() % 9);
    const PlanShape shape{ranks, tokens, top_k, ranks * local_experts, tile_rows, tile_rows};
    const int64_t worst = int64_t{ranks} * tokens * top_k;
    // One expert has all rows but one for each other expert, so these waste all but one of a tile.
    const int64_t others = std::min<int64_t>(local_experts, worst) - 1;
    REQUIRE(shape.max_tiles() == others + (worst - others + tile_rows - 1) / tile_rows);
    REQUIRE(shape.owner(shape.experts - 1) == ranks - 1 && !shape.is_expert(shape.experts));
    // The last row of one source, when all others have given theirs.
    const int32_t rows = static_cast<int32_t>(kMostRows / ranks);
    const Table rows_of_visit(ranks, rows);
    REQUIRE(pull_position(rows_of_visit.data(), ranks, ranks - 1, rows - 1) ==
            int64_t{rows} * ranks - 1);
  }
}

}  // namespace

int main() {
  std::mt19937 rng(5);
  check_random_sizes(rng);
  check_large_sizes(rng);
  check_sizes_at_the_limit(rng);
  std::puts("plans and moves good");
}
