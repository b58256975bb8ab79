#pragma once

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace mok {

// The groups of ranks one after the other, `ranks` each, as positions in the mesh.
struct RankGroups {
  int32_t ranks;
  xla::ffi::Span<const int64_t> positions;
};

}  // namespace mok
