#pragma once

#include "call/memory.h"
#include "xla/ffi/api/ffi.h"

namespace mok {

// The result that a call of the CUDA platform uses as its workspace.
using WorkspaceBuffer = xla::ffi::ResultBuffer<xla::ffi::U8>;

inline Memory memory_of(WorkspaceBuffer buffer) {
  return {reinterpret_cast<char*>(buffer->typed_data()),
          static_cast<int64_t>(buffer->size_bytes())};
}

}  // namespace mok
