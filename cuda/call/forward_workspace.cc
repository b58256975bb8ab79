#include "call/forward_workspace.h"

#include "call/parts.h"

namespace mok::sm90 {

ForwardShape make_forward_shape(const PlanShape& plan, const Directions& directions, bool composed,
                                bool keeps_plan, int64_t ring_rows, int64_t hidden, int64_t inner,
                                bool is_mx) {
  const auto ring_tiles = static_cast<int32_t>(ring_rows / kTileRows);
  const auto most_tiles = static_cast<int32_t>(plan.max_tiles());
  const auto width = static_cast<int32_t>(hidden);
  const auto depth = static_cast<int32_t>(inner);
  return {.plan = plan,
          .directions = directions,
          .composed = composed,
          .keeps_plan = keeps_plan,
          .work = composed ? wave_shape(kCluster, ring_tiles, most_tiles, width, depth, kGroupUnits)
                           : forward_work_shape(ring_tiles, most_tiles, width, depth),
          .ring_rows = ring_rows,
          .hidden = hidden,
          .inner = inner,
          .is_mx = is_mx};
}

int32_t ForwardShape::waves() const {
  return composed ? ceil_div(static_cast<int32_t>(plan.max_tiles()), work.step_tiles) : 0;
}

Workspace lay_out(const ForwardShape& shape, char* base) {
  const PlanShape& plan = shape.plan;
  const bool alone = !shape.has_peers();
  const bool pushes_rows = shape.directions.combine_push;
  Parts parts(base);
  const auto rows_if = [&](bool needed, int64_t rows) {
    return needed ? parts.take<uint16_t>(rows * shape.hidden) : nullptr;
  };
  Workspace space{};
  if (!shape.keeps_plan) {
    space.tables = {.row_source = parts.take<int32_t>(plan.max_rows()),
                    .pull_order = nullptr,
                    .tile_expert = parts.take<int32_t>(plan.max_tiles()),
                    .expert_tile = parts.take<int32_t>(plan.local_experts() + 1),
                    .expert_rows = parts.take<int32_t>(plan.local_experts()),
                    .slot_rank = parts.take<int32_t>(plan.choices()),
                    .slot_row = parts.take<int32_t>(plan.choices()),
                    .counts = parts.take<int32_t>(kPlanCounts)};
  }
  space.routes = alone ? nullptr : parts.take<int32_t>(plan.ranks * plan.choices());
  space.plan_scratch = parts.take<int32_t>(plan_scratch_words(plan));
  space.list = {.items = parts.take<WorkItem>(max_items(plan, shape.work)),
                .all_items = parts.take<ItemRange>(1),
                .tile_count = parts.take<int32_t>(1),
                .waves = parts.take<Wave>(shape.waves()),
                .wave_count = shape.waves()};
  space.hidden_ring = parts.take<uint16_t>(shape.ring_rows * shape.inner);
  space.received = rows_if(shape.pulls_tokens(), plan.ranks * plan.tokens);
  space.rounded = rows_if(alone && shape.is_mx, plan.tokens);
  space.own_slots = rows_if(alone && pushes_rows, plan.choices());
  space.outputs = rows_if(alone && !pushes_rows, plan.max_rows());
  space.dispatched = rows_if(shape.composed, shape.ring_rows);
  space.output_ring = rows_if(shape.composed && pushes_rows, shape.ring_rows);

  const int64_t tiles = plan.max_tiles();
  const int64_t zero_begin = parts.used();
  space.zero = parts.take<char>(0);
  space.link_failed = parts.take<int32_t>(1);
  space.kernel_failed = parts.take<int32_t>(1);
  space.zeros = parts.take<uint16_t>(shape.hidden);
  space.next_items = parts.take<uint32_t>(shape.composed ? 2 * shape.waves() : 1);
  space.hidden_ready = parts.take<uint32_t>(tiles);
  space.down_done = parts.take<uint32_t>(tiles);
  space.pulled = shape.pulls_tokens() ? parts.take<uint32_t>(tiles) : nullptr;
  space.to_pull = shape.pulls_tokens() ? parts.take<uint64_t>(tiles) : nullptr;
  space.zero_bytes = parts.used() - zero_begin;

  space.bytes = parts.used();
  return space;
}

}  // namespace mok::sm90
