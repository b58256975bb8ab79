#include "host/faults.h"

#include <mutex>
#include <utility>

namespace mok {
namespace {

constexpr size_t kCapacity = 256;

struct Records {
  std::mutex mutex;
  FaultReport report{};
};

// Never destroyed: worker threads outlive main().
Records& records() {
  static Records* const instance = new Records;
  return *instance;
}

}  // namespace

const char* name(FaultKind kind) {
  switch (kind) {
    case FaultKind::kTimeout:
      return "timeout";
    case FaultKind::kExpertOutOfRange:
      return "expert_out_of_range";
    case FaultKind::kKernelTimeout:
      return "kernel_timeout";
    case FaultKind::kOtherCall:
      return "other_call";
  }
  return "unknown";
}

const char* name(Operation operation) {
  switch (operation) {
    case Operation::kPlan:
      return "plan";
    case Operation::kDispatch:
      return "dispatch";
    case Operation::kCombine:
      return "combine";
    case Operation::kReverseCombine:
      return "reverse combine";
    case Operation::kReverseDispatch:
      return "reverse dispatch";
    case Operation::kMeeting:
      return "meeting";
    case Operation::kKernel:
      return "kernel";
  }
  return "unknown operation";
}

void record_fault(const Fault& fault) {
  Records& all = records();
  const std::lock_guard lock(all.mutex);
  if (all.report.faults.size() < kCapacity) {
    all.report.faults.push_back(fault);
  } else {
    ++all.report.dropped;
  }
}

FaultReport take_faults() {
  Records& all = records();
  const std::lock_guard lock(all.mutex);
  return std::exchange(all.report, {});
}

}  // namespace mok
