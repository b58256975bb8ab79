#pragma once

#include <cstdint>

#include "core/plan.h"
#include "sm90/forward.h"
#include "sm90/plan.h"
#include "sm90/work_list.h"

// The memory that one forward call needs beside its operands and results: one XLA buffer, in parts.
namespace mok::sm90 {

struct ForwardShape {
  PlanShape plan;
  WorkShape work;
  int64_t ring_rows;
  int64_t hidden;
  int64_t inner;
};

struct Workspace {
  PlanTables tables;
  int32_t* plan_scratch;
  WorkList list;
  void* hidden_ring;    // [ring_rows, inner]
  uint16_t* received;   // [ranks, tokens, hidden]; only with peers
  int32_t* routes;      // [ranks, tokens, top_k]; only with peers
  uint16_t* own_slots;  // [tokens, top_k, hidden]; only without peers
  const uint16_t** x;   // [ranks]
  uint16_t** slots;     // [ranks]
  int32_t* link_failed;
  int32_t* kernel_failed;
  int64_t bytes;
};

// Sizes with the cluster, group and step sizes that measured best.
ForwardShape make_forward_shape(const PlanShape& plan, int64_t ring_rows, int64_t hidden,
                                int64_t inner);

// Lays the parts out from `base`; with a null base only `bytes` means anything.
Workspace lay_out(const ForwardShape& shape, char* base);

}  // namespace mok::sm90
