#include "call/arenas.h"

#include <algorithm>

namespace mok {
namespace {

// Of this rank's choices, if they are pushed to it; else of all that its experts may have to take.
int64_t rows_shown(const PlanShape& plan, bool is_push) {
  return is_push ? plan.choices() : plan.max_rows();
}

}  // namespace

ArenaLayout forward_arena(const PlanShape& plan, const Directions& directions, int64_t width,
                          bool is_mx) {
  return {.ranks = plan.ranks,
          .choices = plan.choices(),
          .tokens = plan.tokens,
          .width = width,
          .x_is_pushed = directions.dispatch_push,
          .rows = rows_shown(plan, directions.combine_push),
          .is_mx = is_mx};
}

ArenaLayout gradient_arena(const PlanShape& plan, const Directions& directions, int64_t width,
                           bool is_mx) {
  ArenaLayout layout = forward_arena(plan, directions, width, is_mx);
  layout.rows = std::max(layout.rows, rows_shown(plan, directions.reverse_dispatch_push));
  layout.has_gradients = true;
  layout.dy_is_pushed = directions.reverse_combine_push;
  return layout;
}

}  // namespace mok
