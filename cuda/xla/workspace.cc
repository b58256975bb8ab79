#include "xla/workspace.h"

namespace mok::sm90 {
namespace {

class Parts {
 public:
  explicit Parts(char* base) : base_(base) {}

  template <typename T>
  T* take(int64_t count) {
    char* const part = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return reinterpret_cast<T*>(part);
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace

ForwardShape make_forward_shape(const PlanShape& plan, int64_t ring_rows, int64_t hidden,
                                int64_t inner) {
  constexpr int kGroupUnits = 8;
  constexpr int kStepTiles = 16384 / kTileRows;
  return {.plan = plan,
          .work = work_shape(kForwardCluster, static_cast<int32_t>(ring_rows / kTileRows),
                             static_cast<int32_t>(hidden), static_cast<int32_t>(inner), kGroupUnits,
                             kStepTiles),
          .ring_rows = ring_rows,
          .hidden = hidden,
          .inner = inner};
}

Workspace lay_out(const ForwardShape& shape, char* base) {
  const PlanShape& plan = shape.plan;
  const bool alone = plan.ranks == 1;
  Parts parts(base);
  Workspace space{};
  space.tables = {.row_source = parts.take<int32_t>(plan.max_rows()),
                  .pull_order = nullptr,
                  .tile_expert = parts.take<int32_t>(plan.max_tiles()),
                  .expert_tile = parts.take<int32_t>(plan.local_experts() + 1),
                  .expert_rows = parts.take<int32_t>(plan.local_experts()),
                  .slot_rank = parts.take<int32_t>(plan.choices()),
                  .slot_row = parts.take<int32_t>(plan.choices()),
                  .counts = parts.take<int32_t>(kPlanCounts)};
  space.plan_scratch = parts.take<int32_t>(plan_scratch_words(plan));
  space.list = {.items = parts.take<WorkItem>(max_items(plan, shape.work)),
                .item_count = parts.take<int32_t>(1),
                .tile_count = parts.take<int32_t>(1),
                .counters = parts.take<uint32_t>(2 * max_work_tiles(plan)),
                .counter_count = 2 * max_work_tiles(plan)};
  space.hidden_ring = parts.take<uint16_t>(shape.ring_rows * shape.inner);
  space.received = alone ? nullptr : parts.take<uint16_t>(plan.ranks * plan.tokens * shape.hidden);
  space.routes = alone ? nullptr : parts.take<int32_t>(plan.ranks * plan.choices());
  space.own_slots = alone ? parts.take<uint16_t>(plan.choices() * shape.hidden) : nullptr;
  space.x = parts.take<const uint16_t*>(plan.ranks);
  space.slots = parts.take<uint16_t*>(plan.ranks);
  space.link_failed = parts.take<int32_t>(1);
  space.kernel_failed = parts.take<int32_t>(1);
  space.bytes = parts.used();
  return space;
}

}  // namespace mok::sm90
