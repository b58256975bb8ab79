#include "host/plan_builder.h"

#include <algorithm>
#include <vector>

namespace mok {
namespace {

// Where the experts of all ranks lie.
struct Layout {
  std::vector<int64_t> rows;        // [experts]
  std::vector<int64_t> first_tile;  // [experts] on the owner
  std::vector<int64_t> tiles;       // [ranks]
};

Layout lay_out(const PlanShape& shape, std::span<const int32_t* const> routes) {
  Layout layout{std::vector<int64_t>(shape.experts), std::vector<int64_t>(shape.experts),
                std::vector<int64_t>(shape.ranks)};
  for (const int32_t* ids : routes) {
    for (int64_t choice = 0; choice < shape.choices(); ++choice) {
      if (shape.is_expert(ids[choice])) {
        ++layout.rows[ids[choice]];
      }
    }
  }
  for (int32_t expert = 0; expert < shape.experts; ++expert) {
    int64_t& tiles = layout.tiles[shape.owner(expert)];
    layout.first_tile[expert] = tiles;
    tiles += shape.tiles(layout.rows[expert]);
  }
  return layout;
}

void fill_expert_tables(const PlanShape& shape, const Layout& layout, const RankTables& output) {
  const int32_t local_experts = shape.local_experts();
  const int32_t first_expert = output.rank * local_experts;
  const PlanTables& tables = output.tables;
  std::fill_n(tables.tile_expert, shape.max_tiles(), kPadding);
  int64_t rows = 0;
  for (int32_t local = 0; local < local_experts; ++local) {
    const int64_t expert_rows = layout.rows[first_expert + local];
    const int64_t first_tile = layout.first_tile[first_expert + local];
    tables.expert_rows[local] = static_cast<int32_t>(expert_rows);
    tables.expert_tile[local] = static_cast<int32_t>(first_tile);
    std::fill_n(tables.tile_expert + first_tile, shape.tiles(expert_rows), local);
    rows += expert_rows;
  }
  tables.expert_tile[local_experts] = static_cast<int32_t>(layout.tiles[output.rank]);
  tables.counts[kRows] = static_cast<int32_t>(rows);
  tables.counts[kTiles] = static_cast<int32_t>(layout.tiles[output.rank]);
  tables.counts[kMostTiles] =
      static_cast<int32_t>(*std::max_element(layout.tiles.begin(), layout.tiles.end()));
  tables.counts[kMasked] = 0;
  tables.counts[kOutOfRange] = 0;
}

void fill_pull_order(const PlanShape& shape, const RankTables& output) {
  const PlanTables& tables = output.tables;
  const int64_t rows = static_cast<int64_t>(tables.counts[kTiles]) * shape.tile_rows;
  const auto visit_of_row = [&](int64_t row) {
    const auto source = static_cast<int32_t>(tables.row_source[row] / shape.choices());
    return visit_index(source, output.rank, shape.ranks);
  };
  std::fill_n(tables.pull_order, shape.max_rows(), kPadding);
  std::vector<int32_t> rows_of_visit(shape.ranks);
  std::vector<int32_t> index(shape.ranks);
  for (int64_t begin = 0; begin < rows; begin += shape.chunk_rows) {
    const int64_t end = std::min(begin + shape.chunk_rows, rows);
    std::fill(rows_of_visit.begin(), rows_of_visit.end(), 0);
    std::fill(index.begin(), index.end(), 0);
    for (int64_t row = begin; row < end; ++row) {
      if (tables.row_source[row] != kPadding) {
        ++rows_of_visit[visit_of_row(row)];
      }
    }
    for (int64_t row = begin; row < end; ++row) {
      if (tables.row_source[row] != kPadding) {
        const int32_t visit = visit_of_row(row);
        const int64_t position =
            pull_position(rows_of_visit.data(), shape.ranks, visit, index[visit]++);
        tables.pull_order[begin + position] = static_cast<int32_t>(row);
      }
    }
  }
}

}  // namespace

void build_plans(const PlanShape& shape, std::span<const int32_t* const> routes,
                 std::span<const RankTables> outputs) {
  const Layout layout = lay_out(shape, routes);
  std::vector<const PlanTables*> tables_of_rank(shape.ranks, nullptr);
  for (const RankTables& output : outputs) {
    tables_of_rank[output.rank] = &output.tables;
    fill_expert_tables(shape, layout, output);
    std::fill_n(output.tables.row_source, shape.max_rows(), kPadding);
    std::fill_n(output.tables.slot_rank, shape.choices(), kMaskedChoice);
    std::fill_n(output.tables.slot_row, shape.choices(), kMaskedChoice);
  }

  std::vector<int64_t> next_row(shape.experts);
  for (int32_t expert = 0; expert < shape.experts; ++expert) {
    next_row[expert] = layout.first_tile[expert] * shape.tile_rows;
  }
  for (int32_t source = 0; source < shape.ranks; ++source) {
    const PlanTables* const home = tables_of_rank[source];
    for (int64_t choice = 0; choice < shape.choices(); ++choice) {
      const int32_t id = routes[source][choice];
      if (!shape.is_expert(id)) {
        if (home) {
          ++home->counts[id == kMaskedChoice ? kMasked : kOutOfRange];
        }
        continue;
      }
      const int32_t owner = shape.owner(id);
      const auto row = static_cast<int32_t>(next_row[id]++);
      if (const PlanTables* const destination = tables_of_rank[owner]) {
        destination->row_source[row] = static_cast<int32_t>(source * shape.choices() + choice);
      }
      if (home) {
        home->slot_rank[choice] = owner;
        home->slot_row[choice] = row;
      }
    }
  }

  for (const RankTables& output : outputs) {
    fill_pull_order(shape, output);
  }
}

}  // namespace mok
