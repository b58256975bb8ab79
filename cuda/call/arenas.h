#pragma once

#include <cstdint>

#include "call/export.h"
#include "core/directions.h"
#include "core/plan.h"
#include "link/arena_layout.h"

// What the ranks of a call show each other, by what the call is for.
namespace mok {

// Of a forward pass outside gradients. `width` is that of a token, which is shown in MXFP8 if
// `is_mx`.
MOK_EXPORT ArenaLayout forward_arena(const PlanShape& plan, const Directions& directions,
                                     int64_t width, bool is_mx);

// Of both passes under a gradient: they take turns in one arena, as two forward passes do.
MOK_EXPORT ArenaLayout gradient_arena(const PlanShape& plan, const Directions& directions,
                                      int64_t width, bool is_mx);

}  // namespace mok
