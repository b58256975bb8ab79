#pragma once

#include <span>

#include "core/plan.h"

namespace mok {

struct RankTables {
  int32_t rank;
  PlanTables tables;
};

// Fills the tables of the given ranks in one walk over all routes.
// `routes[r]` holds rank r's expert ids, [tokens, top_k].
void build_plans(const PlanShape& shape, std::span<const int32_t* const> routes,
                 std::span<const RankTables> outputs);

}  // namespace mok
