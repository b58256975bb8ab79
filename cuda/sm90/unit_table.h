#pragma once

#include <cstdint>

#include "sm90/work.h"

// Where in the work list the items of a unit stand: a closed formula, so that every unit can be
// listed by itself.
namespace mok::sm90 {

// What lies before an expert.
struct Start {
  Units units;
  int32_t tile;
};

// The last of `count` positions for which `holds`, which does for the first and then up to some
// position.
template <typename Holds>
MOK_HOST_DEVICE int32_t last_that(int32_t count, const Holds& holds) {
  int32_t low = 0;
  int32_t high = count;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (holds(middle) ? low : high) = middle;
  }
  return low;
}

// The plan of a rank in units.
struct UnitTable {
  const WorkShape& shape;
  const Start* starts;
  int32_t experts;

  MOK_HOST_DEVICE Units units_of_expert(int32_t expert) const {
    return starts[expert + 1].units - starts[expert].units;
  }
  MOK_HOST_DEVICE int32_t expert_of_unit(int32_t unit) const {
    return last_that(experts, [&](int32_t e) { return starts[e].units.count() <= unit; });
  }

  // Units of the groups that begin before a step's first tile.
  MOK_HOST_DEVICE Units before_step(int32_t step) const {
    const int64_t tile = static_cast<int64_t>(step) * shape.step_tiles;
    if (tile == 0) {
      return {};
    }
    const int32_t expert = last_that(experts, [&](int32_t e) { return starts[e].tile < tile; });
    const Units units = units_of_expert(expert);
    if (units.count() == 0) {
      return starts[expert].units;
    }
    const Groups groups = groups_of(shape, units.count());
    const int32_t group = last_that(groups.count, [&](int32_t g) {
      return starts[expert].tile + tiles_of(shape, first_units(units, groups.begin(g))) < tile;
    });
    return starts[expert].units + first_units(units, groups.begin(group + 1));
  }

  // A step of a shape without lag; empty past the last one.
  MOK_HOST_DEVICE Wave wave(int32_t index) const {
    const auto before = [&](int32_t step) { return before_step(step); };
    const int32_t gate_up = items_before(shape, Product::kGateUp, index, before);
    const int32_t down = items_before(shape, Product::kDown, index, before);
    const int32_t end = items_before(shape, Product::kGateUp, index + 1, before);
    return {.first_tile = tiles_of(shape, before_step(index)),
            .end_tile = tiles_of(shape, before_step(index + 1)),
            .gate_up = {gate_up, down},
            .down = {down, end}};
  }

  // Calls place(position in the list, item) for a unit's items of every `stride`-th span of columns
  // from the `first` on.
  template <typename Place>
  MOK_HOST_DEVICE void place_items(int32_t unit, int32_t first, int32_t stride,
                                   const Place& place) const {
    const auto before = [&](int32_t step) { return before_step(step); };
    const int32_t expert = expert_of_unit(unit);
    const Start start = starts[expert];
    const Units units = units_of_expert(expert);
    const int32_t index = unit - start.units.count();
    const UnitKind kind = kind_of(units, index);

    const Groups groups = groups_of(shape, units.count());
    const int32_t group_index = groups.of(index);
    const Units group_begin = first_units(units, groups.begin(group_index));
    const Units group = first_units(units, groups.begin(group_index + 1)) - group_begin;
    const int32_t step = (start.tile + tiles_of(shape, group_begin)) / shape.step_tiles;
    const Units before_in_step = start.units + group_begin - before_step(step);
    const int32_t rank = (first_units(units, index) - group_begin).of(kind);

    WorkItem item = unit_of(shape, expert, start.tile, units, index);
    for (const Product product : {Product::kGateUp, Product::kDown}) {
      const int32_t columns = shape.columns(product);
      const int32_t base =
          items_before(shape, product, step, before) + before_in_step.items(columns, shape.cluster);
      const int32_t span = columns_of_item(kind, shape.cluster);
      item.flags |= product == Product::kDown ? WorkItem::kDownFlag : 0;
      for (int32_t column = first * span; column < columns; column += stride * span) {
        item.column_block = column;
        place(base + item_in_group(group, shape.cluster, kind, rank, column), item);
      }
    }
  }
};

}  // namespace mok::sm90
