#pragma once

#include <cstddef>
#include <cstdint>

#include "core/mx_shape.h"
#include "xla/ffi/api/ffi.h"

// What the handlers of MXFP8 of both platforms have in common. Values are float32 or bfloat16
// [..., length, inner]. Elements and scales, float8_e4m3fn and float8_e8m0fnu, are types for which
// the FFI knows no C++ type.
namespace mok {

// jax.vmap puts its axes before those of a call.
inline MxShape mx_shape(xla::ffi::AnyBuffer array) {
  const auto sizes = array.dimensions();
  const size_t last = sizes.size() - 1;
  MxShape shape{1, sizes[last - 1], sizes[last]};
  for (size_t axis = 0; axis + 1 < last; ++axis) {
    shape.outer *= sizes[axis];
  }
  return shape;
}

inline uint8_t* bytes(xla::ffi::AnyBuffer array) {
  return static_cast<uint8_t*>(array.untyped_data());
}

// The second result of a call that rounds along `inner` too, or null.
inline void* rounded_across(xla::ffi::RemainingRets others) {
  return others.size() == 1 ? (*others.get<xla::ffi::AnyBuffer>(0))->untyped_data() : nullptr;
}

}  // namespace mok
