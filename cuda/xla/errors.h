#pragma once

#include <string>

#include "xla/ffi/api/ffi.h"

// How a handler of the CUDA platform reports what went wrong.
namespace mok {

inline xla::ffi::Error failure(const std::string& what) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kInternal, "jax_mok: " + what);
}

// Success for an empty string.
inline xla::ffi::Error failure_if(const std::string& what) {
  return what.empty() ? xla::ffi::Error::Success() : failure(what);
}

}  // namespace mok
