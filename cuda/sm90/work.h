#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "sm90/tile.h"

// The order in which clusters of blocks work through a rank's tiles.
//
// A unit is what a cluster takes of an expert's rows at a time. Full units have two tiles a block,
// neighbouring blocks taking neighbouring rows and sharing the weights. What is left at an expert's
// end is a pair of tiles, a single tile, or both; there all blocks take the same rows and each
// another column block.
//
// The units of an expert are grouped so that a group's rows and some column blocks of weights stay
// in the L2 cache; a group never mixes experts. Groups make steps, and the down-projection of a
// step follows the gate/up-projection of the step `lag` later: whoever waits for another block
// waits for an earlier item of this list.
namespace mok::sm90 {

enum class Product : int32_t { kGateUp, kDown };

struct alignas(16) WorkItem {
  int32_t first_tile;
  int32_t column_block;
  int32_t expert;
  int32_t flags;

  static constexpr int32_t kDownFlag = 1;
  static constexpr int32_t kTwoTilesFlag = 2;   // per block
  static constexpr int32_t kAlongRowsFlag = 4;  // blocks of the cluster take different rows
  static constexpr int32_t kStopFlag = 8;       // no item: the list has come to its end
};

// Positions in the work list.
struct ItemRange {
  int32_t begin;
  int32_t end;
};

// A step of a list without lag: all its gate/up items, then all its down items.
struct Wave {
  int32_t first_tile;
  int32_t end_tile;
  ItemRange gate_up;
  ItemRange down;
};

struct WorkShape {
  int32_t cluster;      // blocks
  int32_t group_units;  // about so many
  int32_t step_tiles;   // a group belongs to step (its first tile) / step_tiles
  int32_t lag;          // steps
  int32_t ring_tiles;
  int32_t gate_up_columns;  // column blocks
  int32_t down_columns;

  MOK_HOST_DEVICE int32_t unit_tiles() const { return cluster * kBlockTiles; }
  // Of the largest group.
  int32_t group_tiles() const {
    return (group_units > 1 ? group_units + group_units / 2 : 1) * unit_tiles();
  }
  MOK_HOST_DEVICE int32_t columns(Product product) const {
    return product == Product::kGateUp ? gate_up_columns : down_columns;
  }
};

enum class UnitKind : int32_t { kFull, kPair, kSingle };

// How many units there are of each kind.
struct Units {
  int32_t full;
  int32_t pair;
  int32_t single;

  MOK_HOST_DEVICE int32_t count() const { return full + pair + single; }
  MOK_HOST_DEVICE int32_t of(UnitKind kind) const {
    return kind == UnitKind::kFull ? full : kind == UnitKind::kPair ? pair : single;
  }
  MOK_HOST_DEVICE Units operator+(Units other) const {
    return {full + other.full, pair + other.pair, single + other.single};
  }
  MOK_HOST_DEVICE Units operator-(Units other) const {
    return {full - other.full, pair - other.pair, single - other.single};
  }
  // Items of a product over these units.
  MOK_HOST_DEVICE int32_t items(int32_t columns, int32_t cluster) const {
    return full * columns + (pair + single) * ceil_div(columns, cluster);
  }
};

// Column blocks that an item of a unit covers.
MOK_HOST_DEVICE inline int32_t columns_of_item(UnitKind kind, int32_t cluster) {
  return kind == UnitKind::kFull ? 1 : cluster;
}

MOK_HOST_DEVICE inline Units units_of(const WorkShape& shape, int32_t tiles) {
  const int32_t full = tiles / shape.unit_tiles();
  const int32_t rest = tiles - full * shape.unit_tiles();
  return {full, rest / kBlockTiles, rest % kBlockTiles};
}

// An expert's units in order: kind of the `index`-th one.
MOK_HOST_DEVICE inline UnitKind kind_of(Units expert, int32_t index) {
  return index < expert.full                 ? UnitKind::kFull
         : index < expert.full + expert.pair ? UnitKind::kPair
                                             : UnitKind::kSingle;
}

// The first `index` of an expert's units.
MOK_HOST_DEVICE inline Units first_units(Units expert, int32_t index) {
  const int32_t full = index < expert.full ? index : expert.full;
  const int32_t pair = index - full < expert.pair ? index - full : expert.pair;
  return {full, pair, index - full - pair};
}

// Tiles of so many units.
MOK_HOST_DEVICE inline int32_t tiles_of(const WorkShape& shape, Units units) {
  return units.full * shape.unit_tiles() + units.pair * kBlockTiles + units.single;
}

// The `index`-th unit of an expert whose tiles begin at `first_tile`, without its column.
MOK_HOST_DEVICE inline WorkItem unit_of(const WorkShape& shape, int32_t expert, int32_t first_tile,
                                        Units units, int32_t index) {
  const UnitKind kind = kind_of(units, index);
  const int32_t flags = (kind == UnitKind::kSingle ? 0 : WorkItem::kTwoTilesFlag) |
                        (kind == UnitKind::kFull ? WorkItem::kAlongRowsFlag : 0);
  return {first_tile + tiles_of(shape, first_units(units, index)), 0, expert, flags};
}

// An expert's units in groups of nearly equal size, at most half as large again as wanted.
struct Groups {
  int32_t units;
  int32_t count;

  MOK_HOST_DEVICE int32_t begin(int32_t group) const {
    return static_cast<int32_t>(static_cast<int64_t>(group) * units / count);
  }
  MOK_HOST_DEVICE int32_t of(int32_t unit) const {
    return static_cast<int32_t>((static_cast<int64_t>(unit + 1) * count - 1) / units);
  }
};

MOK_HOST_DEVICE inline Groups groups_of(const WorkShape& shape, int32_t units) {
  const int32_t count = (units + shape.group_units / 2) / shape.group_units;
  return {units, count > 1 ? count : 1};
}

// Position of an item within its group, columns outermost; `rank` counts the unit among the
// group's units of its kind. Columns come in spans of what an item of a short unit covers.
MOK_HOST_DEVICE inline int32_t item_in_group(Units group, int32_t cluster, UnitKind kind,
                                             int32_t rank, int32_t column) {
  const int32_t within = column % cluster;
  int32_t before = column / cluster * group.items(cluster, cluster);
  switch (kind) {
    case UnitKind::kFull:
      before += within * group.full + (within > 0 ? group.pair + group.single : 0);
      break;
    case UnitKind::kPair:
      before += group.full;
      break;
    case UnitKind::kSingle:
      before += group.full + group.pair;
      break;
  }
  return before + rank;
}

// Items before the first one of a step; `before(step)` are the units of earlier steps.
template <typename UnitsBefore>
MOK_HOST_DEVICE int32_t items_before(const WorkShape& shape, Product product, int32_t step,
                                     const UnitsBefore& before) {
  const bool is_down = product == Product::kDown;
  const int32_t gate_up_steps = is_down ? step + shape.lag + 1 : step;
  const int32_t down_steps = is_down ? step : step > shape.lag ? step - shape.lag : 0;
  return before(gate_up_steps).items(shape.gate_up_columns, shape.cluster) +
         before(down_steps).items(shape.down_columns, shape.cluster);
}

// The tile that lay in a tile's place in the ring before; -1 for none.
MOK_HOST_DEVICE inline int32_t former_tile(int32_t tile, int32_t ring_tiles) {
  return tile < ring_tiles ? -1 : tile - ring_tiles;
}

// Of tiles looked at together, from the `known` first ones on, the bits of `missing` are not there;
// those at `end` and behind were not looked at. Returns how many first tiles are known to be there.
MOK_HOST_DEVICE inline int32_t tiles_known(int32_t known, int32_t end, uint32_t missing) {
  int32_t seen = 0;
  while (seen < 32 && known + seen < end && (missing >> seen & 1) == 0) {
    ++seen;
  }
  return known + seen;
}

// What one block of a cluster does of an item.
struct BlockWork {
  Product product;
  int32_t tile;
  int32_t tiles;  // 1 or 2
  int32_t column_block;
  int32_t expert;
  bool shares_weights;  // all blocks of the cluster need the same column block
};

MOK_HOST_DEVICE inline BlockWork block_work(const WorkItem& item, int32_t block_in_cluster) {
  const bool along_rows = item.flags & WorkItem::kAlongRowsFlag;
  return {
      .product = item.flags & WorkItem::kDownFlag ? Product::kDown : Product::kGateUp,
      .tile = item.first_tile + (along_rows ? block_in_cluster * kBlockTiles : 0),
      .tiles = item.flags & WorkItem::kTwoTilesFlag ? 2 : 1,
      .column_block = item.column_block + (along_rows ? 0 : block_in_cluster),
      .expert = item.expert,
      .shares_weights = along_rows,
  };
}

// Without a lag and with steps of a tile; groups as large as wanted, or as `fits` allows, asked
// about the tiles of the largest one.
template <typename Fits>
WorkShape shape_of_groups(int32_t cluster, int32_t ring_tiles, int32_t hidden, int32_t inner,
                          int32_t group_units, const Fits& fits) {
  WorkShape shape{.cluster = cluster,
                  .group_units = group_units,
                  .step_tiles = 1,
                  .lag = 0,
                  .ring_tiles = ring_tiles,
                  .gate_up_columns = gate_up_column_blocks(inner),
                  .down_columns = down_column_blocks(hidden)};
  while (shape.group_units > 1 && !fits(shape.group_tiles())) {
    --shape.group_units;
  }
  return shape;
}

// Tiles that a ring has room for: no end of them, if it holds the most that there may be.
inline int32_t room_of(int32_t ring_tiles, int32_t most_tiles) {
  constexpr int32_t kEndless = 1 << 30;
  return most_tiles <= ring_tiles ? kEndless : ring_tiles;
}

// Groups and steps as large as wanted, or as the ring has room: it holds the hidden rows of a step
// and of the `lag` steps before it, and the last group of a step may reach beyond.
inline WorkShape work_shape(int32_t cluster, int32_t ring_tiles, int32_t most_tiles, int32_t hidden,
                            int32_t inner, int32_t group_units, int32_t step_tiles) {
  const int32_t room = room_of(ring_tiles, most_tiles);
  const auto fits = [&](int32_t group_tiles) { return 2 + group_tiles <= room; };
  WorkShape shape = shape_of_groups(cluster, ring_tiles, hidden, inner, group_units, fits);
  if (fits(shape.group_tiles())) {
    const int32_t most = (room - shape.group_tiles()) / 2;
    shape.step_tiles = step_tiles < most ? step_tiles : most;
    shape.lag = 1;
  }
  return shape;
}

// The group and step sizes that measured best.
constexpr int32_t kGroupUnits = 8;
constexpr int32_t kStepTiles = 16384 / kTileRows;

// Of the fused forward kernel.
inline WorkShape forward_work_shape(int32_t ring_tiles, int32_t most_tiles, int32_t hidden,
                                    int32_t inner) {
  return work_shape(kCluster, ring_tiles, most_tiles, hidden, inner, kGroupUnits, kStepTiles);
}

// Steps that are waves, one after the other: as large as the ring has room, groups small enough for
// most of the ring to be the step's.
inline WorkShape wave_shape(int32_t cluster, int32_t ring_tiles, int32_t most_tiles, int32_t hidden,
                            int32_t inner, int32_t group_units) {
  const int32_t room = room_of(ring_tiles, most_tiles);
  const auto fits = [&](int32_t group_tiles) { return 2 * group_tiles <= room; };
  WorkShape shape = shape_of_groups(cluster, ring_tiles, hidden, inner, group_units, fits);
  shape.step_tiles = room - shape.group_tiles() + 1;
  return shape;
}

}  // namespace mok::sm90
