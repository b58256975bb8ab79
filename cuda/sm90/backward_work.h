#pragma once

#include <algorithm>
#include <cstdint>

#include "core/host_device.h"
#include "sm90/tile.h"
#include "sm90/unit_table.h"
#include "sm90/work.h"

// The order of the backward kernel's items. Those of the first three products are over units of
// rows, as in the forward kernel; those of the weights' gradients are over experts, a pair of row
// tiles of the gradient a cluster, one a block.
namespace mok::sm90 {

enum class BackwardProduct : int32_t { kReplay, kHidden, kInput, kGateUpWeights, kDownWeights };

// In a WorkItem's flags, beside those of the forward kernel. An item of the weights' gradients has
// the pair of row tiles as its first_tile.
constexpr int32_t kBackwardProductShift = 8;
constexpr int32_t kBackwardWaveShift = 12;

MOK_HOST_DEVICE inline BackwardProduct product_of(const WorkItem& item) {
  return static_cast<BackwardProduct>(item.flags >> kBackwardProductShift & 0xf);
}
MOK_HOST_DEVICE inline int32_t wave_of(const WorkItem& item) {
  return item.flags >> kBackwardWaveShift;
}
MOK_HOST_DEVICE inline int32_t backward_flags(BackwardProduct product, int32_t wave) {
  return static_cast<int32_t>(product) << kBackwardProductShift | wave << kBackwardWaveShift;
}

struct BackwardWave {
  Units units;         // of earlier waves
  int32_t first_tile;  // where its first unit begins
  int32_t first_item;
  int32_t replays;       // 1 if its pre-activations are computed anew
  int32_t first_expert;  // of those whose weights' gradients it adds to
  int32_t experts;
};

struct BackwardRanges {
  ItemRange replay;
  ItemRange hidden;
  ItemRange input;
  ItemRange weights;
};

struct BackwardShape {
  WorkShape work;             // its steps, lag and columns mean nothing here
  int32_t wave_tiles;         // most of a wave
  int32_t least_split_tiles;  // least of a wave whose end splits an expert
  int32_t replay_columns;     // blocks of 128 of I, gate and up
  int32_t hidden_columns;     // blocks of 256 of I
  int32_t input_columns;      // blocks of 256 of H
  int32_t weight_pairs;       // pairs of 128 rows of H
  int32_t down_columns;       // blocks of 256 of I

  MOK_HOST_DEVICE int32_t items_of_expert() const {
    return weight_pairs * (replay_columns + down_columns);
  }
  // Items of a wave that read the rings last: its places are free when all have been done. `next`
  // is the number of units before the wave that follows.
  MOK_HOST_DEVICE int32_t last_readers(const BackwardWave& wave, Units next,
                                       int32_t cluster) const {
    return (next - wave.units).items(input_columns, cluster) + wave.experts * items_of_expert();
  }
};

inline BackwardShape backward_shape(int32_t cluster, int32_t ring_tiles, int32_t most_tiles,
                                    int32_t hidden, int32_t inner, int32_t group_units) {
  const WorkShape work = wave_shape(cluster, ring_tiles, most_tiles, hidden, inner, group_units);
  return {.work = work,
          .wave_tiles = room_of(ring_tiles, most_tiles),
          .least_split_tiles = room_of(ring_tiles, most_tiles) - work.group_tiles() + 1,
          .replay_columns = ceil_div(inner, kBlockColumns / 2),
          .hidden_columns = ceil_div(inner, kBlockColumns),
          .input_columns = ceil_div(hidden, kBlockColumns),
          .weight_pairs = ceil_div(hidden, 2 * kBlockRows),
          .down_columns = ceil_div(inner, kBlockColumns)};
}

// The most waves of so many tiles whose end splits an expert.
inline int64_t max_splits(int64_t tiles, const BackwardShape& shape) {
  return tiles / shape.least_split_tiles;
}

// The most waves: two that follow each other have more tiles than one that splits an expert has at
// least; and others end with an expert.
inline int64_t max_backward_waves(int64_t tiles, int64_t experts, const BackwardShape& shape) {
  const int64_t pairs = tiles / (int64_t{shape.least_split_tiles} + 1);
  return std::min(2 * pairs + 1, max_splits(tiles, shape) + experts);
}

// Where the waves begin and what they hold.
struct BackwardTable {
  const BackwardShape& shape;
  UnitTable units;

  MOK_HOST_DEVICE int32_t first_tile_of(int32_t expert) const { return units.starts[expert].tile; }

  MOK_HOST_DEVICE bool is_end(Units before) const {
    return before.count() == units.starts[units.experts].units.count();
  }

  // Whether an expert has more rows than a wave.
  MOK_HOST_DEVICE bool splits_experts() const {
    for (int32_t e = 0; e < units.experts; ++e) {
      if (first_tile_of(e + 1) - first_tile_of(e) > shape.wave_tiles) {
        return true;
      }
    }
    return false;
  }

  // Where the wave that begins after `before` ends. It has whole experts, as many as there is room
  // for: their gradients are then done. An expert that no wave has room for begins a wave, and
  // takes as many as it needs; so one expert at a time is astride the end of a wave.
  MOK_HOST_DEVICE Units end_of_wave(Units before) const {
    const Start all = units.starts[units.experts];
    if (is_end(before)) {
      return before;
    }
    const int32_t first = units.expert_of_unit(before.count());
    const int32_t begin = tile_after(before);
    const int32_t end = begin + shape.wave_tiles;
    if (all.tile <= end) {
      return all.units;
    }
    // The first expert that does not end within the room.
    const int32_t next =
        last_that(units.experts, [&](int32_t e) { return first_tile_of(e) <= end; });
    const Start start = units.starts[next];
    if (next > first) {
      return start.units;
    }
    const Units own = units.units_of_expert(next);
    const Groups groups = groups_of(shape.work, own.count());
    const int32_t group = last_that(groups.count, [&](int32_t g) {
      return start.tile + tiles_of(shape.work, first_units(own, groups.begin(g))) <= end;
    });
    return start.units + first_units(own, groups.begin(group));
  }

  // The tile at which the units after `before` begin.
  MOK_HOST_DEVICE int32_t tile_after(Units before) const {
    if (is_end(before)) {
      return first_tile_of(units.experts);
    }
    const int32_t expert = units.expert_of_unit(before.count());
    const Start start = units.starts[expert];
    return start.tile + tiles_of(shape.work, before - start.units);
  }

  // The wave of the units between. An expert without rows belongs to one wave, so that its
  // gradients are written.
  MOK_HOST_DEVICE BackwardWave wave(Units before, Units after, int32_t saved_tiles,
                                    int32_t first_item) const {
    const int32_t begin = tile_after(before);
    const int32_t end = tile_after(after);
    // The first expert that begins within the wave, or the one astride its begin.
    const int32_t within = begin == 0 ? 0 : 1 + last_that(units.experts, [&](int32_t e) {
                                              return first_tile_of(e) < begin;
                                            });
    const int32_t first_expert = within > 0 && first_tile_of(within) > begin ? within - 1 : within;
    const int32_t last_expert =
        is_end(after) ? units.experts - 1
                      : last_that(units.experts, [&](int32_t e) { return first_tile_of(e) < end; });
    return {before,       begin,
            first_item,   end > saved_tiles ? 1 : 0,
            first_expert, last_expert - first_expert + 1};
  }

  // Where the items of a wave's launches stand, if each has its own.
  MOK_HOST_DEVICE BackwardRanges ranges_of(const BackwardWave& wave, Units after) const {
    const Units units = after - wave.units;
    const auto items = [&](int32_t columns) { return units.items(columns, shape.work.cluster); };
    const int32_t replayed = wave.first_item + (wave.replays ? items(shape.replay_columns) : 0);
    const int32_t hidden = replayed + items(shape.hidden_columns);
    const int32_t input = hidden + items(shape.input_columns);
    const int32_t weights = input + wave.experts * shape.items_of_expert();
    return {{wave.first_item, replayed}, {replayed, hidden}, {hidden, input}, {input, weights}};
  }

  // Calls place(position, item) for a unit's items of every `stride`-th span of columns.
  template <typename Place>
  MOK_HOST_DEVICE void place_unit(int32_t unit, const BackwardWave* waves, int32_t wave_count,
                                  int32_t first, int32_t stride, const Place& place) const {
    const WorkShape& work = shape.work;
    const int32_t wave_index =
        last_that(wave_count, [&](int32_t w) { return waves[w].units.count() <= unit; });
    const BackwardWave& wave = waves[wave_index];
    const Units in_wave = waves[wave_index + 1].units - wave.units;
    const int32_t expert = units.expert_of_unit(unit);
    const Start start = units.starts[expert];
    const Units own = units.units_of_expert(expert);
    const int32_t index = unit - start.units.count();
    const UnitKind kind = kind_of(own, index);
    const Groups groups = groups_of(work, own.count());
    const int32_t group_index = groups.of(index);
    const Units group_begin = first_units(own, groups.begin(group_index));
    const Units group = first_units(own, groups.begin(group_index + 1)) - group_begin;
    const Units before_in_wave = start.units + group_begin - wave.units;
    const int32_t rank = (first_units(own, index) - group_begin).of(kind);
    const WorkItem blank = unit_of(work, expert, start.tile, own, index);

    int32_t base = wave.first_item;
    const auto add_product = [&](BackwardProduct product, int32_t columns) {
      const int32_t span = columns_of_item(kind, work.cluster);
      WorkItem item = blank;
      item.flags |= backward_flags(product, wave_index);
      const int32_t begin = base + before_in_wave.items(columns, work.cluster);
      for (int32_t column = first * span; column < columns; column += stride * span) {
        item.column_block = column;
        place(begin + item_in_group(group, work.cluster, kind, rank, column), item);
      }
      base += in_wave.items(columns, work.cluster);
    };
    if (wave.replays != 0) {
      add_product(BackwardProduct::kReplay, shape.replay_columns);
    }
    add_product(BackwardProduct::kHidden, shape.hidden_columns);
    add_product(BackwardProduct::kInput, shape.input_columns);
  }

  // The index-th of the items of an expert in a wave: column blocks outermost within groups of
  // pairs of row tiles, whose rows then stay in the L2 cache.
  MOK_HOST_DEVICE WorkItem weight_item(int32_t expert, int32_t wave, int32_t index) const {
    constexpr int32_t kGroupPairs = 8;
    const int32_t columns = shape.replay_columns + shape.down_columns;
    const int32_t group = index / (kGroupPairs * columns);
    const int32_t left = shape.weight_pairs - group * kGroupPairs;
    const int32_t pairs = left < kGroupPairs ? left : kGroupPairs;
    const int32_t within = index - group * kGroupPairs * columns;
    const int32_t column = within / pairs;
    const bool is_down = column >= shape.replay_columns;
    return {
        group * kGroupPairs + within % pairs, is_down ? column - shape.replay_columns : column,
        expert,
        WorkItem::kTwoTilesFlag | WorkItem::kAlongRowsFlag |
            backward_flags(
                is_down ? BackwardProduct::kDownWeights : BackwardProduct::kGateUpWeights, wave)};
  }
};

}  // namespace mok::sm90
