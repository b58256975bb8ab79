#pragma once

#include <cstddef>

#include "core/plan.h"
#include "xla/ffi/api/ffi.h"

namespace mok {

// The tables among a call's results, from the `first` on, in the order of PlanTables.
inline PlanTables plan_tables(xla::ffi::RemainingRets results, size_t first = 0) {
  const auto table = [&](size_t index) {
    return (*results.get<xla::ffi::Buffer<xla::ffi::S32>>(first + index))->typed_data();
  };
  return {table(0), table(1), table(2), table(3), table(4), table(5), table(6), table(7)};
}

}  // namespace mok
