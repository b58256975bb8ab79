#pragma once

#include <cstdint>

namespace mok {

// Arrays [outer, length, inner] in MXFP8, blocks along `length`, which is a multiple of kMxBlock.
// Elements have the array's shape, scales [outer, length / kMxBlock, inner].
struct MxShape {
  int64_t outer;
  int64_t length;
  int64_t inner;
};

}  // namespace mok
