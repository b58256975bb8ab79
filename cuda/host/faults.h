#pragma once

#include <string>
#include <vector>

#include "core/fault.h"

namespace mok {

const char* name(FaultKind kind);
const char* name(Operation operation);

// The process's fault records. Bounded: the first ones tell most, later ones are only counted.
void record_fault(const Fault& fault);

struct FaultReport {
  std::vector<Fault> faults;
  int64_t dropped;
};

// Hands out what was recorded since the last call, and forgets it.
FaultReport take_faults();

}  // namespace mok
