#pragma once

#include <cstdint>

// What went wrong during a call, kept until the caller asks.
namespace mok {

enum class FaultKind : int32_t { kTimeout, kExpertOutOfRange, kKernelTimeout, kOtherCall };

enum class Operation : int32_t {
  kPlan,
  kDispatch,
  kCombine,
  kReverseCombine,
  kReverseDispatch,
  kMeeting,  // of a whole GPU call
  kKernel,   // within one, on a GPU
};

struct Fault {
  FaultKind kind;
  Operation operation;
  int32_t group;        // position along the other mesh axes
  int32_t rank;         // who reports; -1 where a GPU call does not know, see `device`
  int32_t peer;         // who is missing; -1 where nobody is
  int64_t expected;     // arrivals or epoch waited for, or number of experts
  int64_t seen;         // arrivals or epoch seen, or number of choices or calls
  int32_t device = -1;  // the GPU's ordinal in this process; -1 for CPU devices
};

}  // namespace mok
