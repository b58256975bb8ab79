#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "xla/ffi/api/ffi.h"

// How a handler reports what went wrong.
namespace mok {

inline xla::ffi::Error failure(const std::string& what) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kInternal, "jax_mok: " + what);
}

// Success for an empty string.
inline xla::ffi::Error failure_if(const std::string& what) {
  return what.empty() ? xla::ffi::Error::Success() : failure(what);
}

// Collects the first error of a sequence of launches.
class Launches {
 public:
  void operator()(const char* what, cudaError_t error) {
    if (error != cudaSuccess && first_.empty()) {
      first_ = std::string(what) + ": " + cudaGetErrorString(error);
    }
  }
  bool failed() const { return !first_.empty(); }
  xla::ffi::Error result() const { return failure_if(first_); }

 private:
  std::string first_;
};

}  // namespace mok
