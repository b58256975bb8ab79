#pragma once

#include <cstdint>

namespace mok {

// A buffer on the device.
struct Memory {
  char* data;
  int64_t bytes;
};

}  // namespace mok
