#include "call/backward_workspace.h"

#include "call/parts.h"

namespace mok {

using namespace mok::sm90;

namespace {

// The lower halves of the partial sums of one expert's gradients.
int64_t halves_bytes(const BackwardShape& shape) {
  return int64_t{shape.items_of_expert()} * kCluster * kBlockRows * kBlockColumns * 2;
}

// Tiles of pre-activations that take as many bytes.
int64_t halves_tiles(const BackwardSizes& sizes, const BackwardShape& shape) {
  const int64_t tile_bytes = 2 * kTileRows * sizes.inner * kBytesPerElement;
  return (halves_bytes(shape) + tile_bytes - 1) / tile_bytes;
}

}  // namespace

BackwardShape BackwardSizes::shape() const {
  return backward_shape(kCluster, static_cast<int32_t>(ring_rows / kTileRows),
                        static_cast<int32_t>(plan.max_tiles()), static_cast<int32_t>(hidden),
                        static_cast<int32_t>(inner), kGroupUnits);
}

bool BackwardSizes::halves_replace_saved() const {
  return replaces_saved() && (saved_rows - ring_rows) / kTileRows >= halves_tiles(*this, shape());
}

SavedTiles BackwardSizes::saved_tiles() const {
  const auto tiles = static_cast<int32_t>(saved_rows / kTileRows);
  const int64_t halves = halves_replace_saved() ? halves_tiles(*this, shape()) : int64_t{0};
  return {tiles, static_cast<int32_t>(tiles - halves)};
}

BackwardWorkspace lay_out(const BackwardSizes& sizes, char* base) {
  const PlanShape& plan = sizes.plan;
  const BackwardShape shape = sizes.shape();
  const bool has_peers = sizes.has_peers();
  const int64_t tiles = plan.max_tiles();
  const int64_t waves = max_backward_waves(tiles, plan.local_experts(), shape);
  Parts parts(base);
  BackwardWorkspace space{};
  space.list.items = parts.take<WorkItem>(max_backward_items(plan, shape));
  space.list.waves = parts.take<BackwardWave>(waves + 1);
  space.list.all_items = parts.take<ItemRange>(1);
  space.list.wave_count = parts.take<int32_t>(1);
  space.list.tile_count = parts.take<int32_t>(1);
  space.list.x_rows = parts.take<const uint16_t*>(tiles * kTileRows);
  space.list.dy_rows = parts.take<const uint16_t*>(tiles * kTileRows);
  space.list.first_row = sizes.pulls() ? parts.take<int32_t>(plan.ranks * plan.tokens) : nullptr;
  space.gradient_ring =
      sizes.replaces_saved() ? nullptr : parts.take<uint16_t>(2 * sizes.ring_rows * sizes.inner);
  space.hidden_ring = parts.take<uint16_t>(sizes.ring_rows * sizes.inner);
  space.dot_parts = parts.take<float>(sizes.ring_rows * shape.replay_columns);
  space.lower_halves = waves > 1 && !sizes.halves_replace_saved()
                           ? reinterpret_cast<uint4*>(parts.take<char>(halves_bytes(shape)))
                           : nullptr;
  const auto rows_if = [&](bool needed, int64_t rows) {
    return needed ? parts.take<uint16_t>(rows * sizes.hidden) : nullptr;
  };
  space.received_x = rows_if(sizes.pulls_x(), plan.ranks * plan.tokens);
  space.received_dy = rows_if(sizes.pulls_dy(), plan.ranks * plan.tokens);
  space.rounded_x = rows_if(sizes.is_mx && !has_peers, plan.tokens);
  space.rounded_dy = rows_if(sizes.is_mx && !has_peers, plan.tokens);
  space.weights = has_peers ? parts.take<float>(plan.ranks * plan.choices()) : nullptr;
  space.dx_rows = rows_if(!has_peers, sizes.dx_rows());
  space.d_weights = has_peers ? nullptr : parts.take<float>(sizes.dx_rows());
  space.x_ring = rows_if(sizes.composed, sizes.ring_rows);
  space.dy_ring = rows_if(sizes.composed, sizes.ring_rows);
  space.dx_ring =
      rows_if(sizes.composed && sizes.directions.reverse_dispatch_push, sizes.ring_rows);

  const int64_t zero_begin = parts.used();
  space.zero = parts.take<char>(0);
  space.link_failed = parts.take<int32_t>(1);
  space.kernel_failed = parts.take<int32_t>(1);
  space.counts = parts.take<int32_t>(kPlanCounts);
  space.list.ranges = parts.take<BackwardRanges>(waves);
  space.zeros = parts.take<uint16_t>(sizes.hidden);
  space.next_items = parts.take<uint32_t>(sizes.composed ? waves * kWaveLaunches : 1);
  space.replayed = parts.take<uint32_t>(tiles);
  space.hidden_ready = parts.take<uint32_t>(tiles);
  space.wave_done = parts.take<uint32_t>(waves);
  space.x_pulled = sizes.pulls_x() ? parts.take<uint32_t>(tiles) : nullptr;
  space.dy_pulled = sizes.pulls_dy() ? parts.take<uint32_t>(tiles) : nullptr;
  space.list.to_pull = sizes.pulls() ? parts.take<uint64_t>(tiles) : nullptr;
  space.zero_bytes = parts.used() - zero_begin;

  space.bytes = parts.used();
  return space;
}

}  // namespace mok
