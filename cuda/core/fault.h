#pragma once

#include <cstdint>

// What went wrong during a call, kept until the caller asks.
namespace mok {

enum class FaultKind : int32_t { kTimeout, kExpertOutOfRange };

enum class Operation : int32_t {
  kPlan,
  kDispatch,
  kCombine,
  kReverseCombine,
  kReverseDispatch,
};

struct Fault {
  FaultKind kind;
  Operation operation;
  int32_t group;     // position along the other mesh axes
  int32_t rank;      // who reports
  int32_t peer;      // who is missing; -1 where nobody is
  int64_t expected;  // arrivals waited for, or number of experts
  int64_t seen;      // arrivals seen, or number of choices out of range
};

}  // namespace mok
