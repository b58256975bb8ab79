#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/directions.h"
#include "core/plan.h"

// What tells calls apart that ranks make at the same time because they run different programs.
namespace mok {

enum class CallKind : int64_t { kPlan, kForward, kBackward };

// The FNV-1a hash, by words.
inline uint64_t hash_of(std::initializer_list<int64_t> words) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const int64_t word : words) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 0x100000001b3;
  }
  return hash;
}

// The same for the same call, and almost surely another for another one. A plan alone has no
// widths.
inline uint64_t signature_of(CallKind kind, const PlanShape& plan, const Directions& directions,
                             int64_t hidden, int64_t inner, bool is_mx) {
  return hash_of({static_cast<int64_t>(kind), plan.ranks, plan.tokens, plan.top_k, plan.experts,
                  plan.tile_rows, directions.dispatch_push, directions.combine_push,
                  directions.reverse_combine_push, directions.reverse_dispatch_push, hidden, inner,
                  is_mx});
}

}  // namespace mok
