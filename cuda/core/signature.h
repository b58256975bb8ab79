#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/directions.h"
#include "core/plan.h"

// What tells calls apart that ranks make at the same time because they run different programs.
namespace mok {

enum class CallKind : int64_t { kPlan, kForward, kBackward };

// The same for the same call, and almost surely another for another one; the FNV-1a hash, by words.
// A plan alone has no widths.
inline uint64_t signature_of(CallKind kind, const PlanShape& plan, const Directions& directions,
                             int64_t hidden, int64_t inner) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const int64_t word :
       {static_cast<int64_t>(kind), int64_t{plan.ranks}, plan.tokens, int64_t{plan.top_k},
        int64_t{plan.experts}, int64_t{directions.dispatch_push}, int64_t{directions.combine_push},
        int64_t{directions.reverse_combine_push}, int64_t{directions.reverse_dispatch_push}, hidden,
        inner}) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 0x100000001b3;
  }
  return hash;
}

}  // namespace mok
