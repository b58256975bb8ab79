#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mok {

// Makes a device the thread's current one. XLA relies on finding its own again.
class OnDevice {
 public:
  explicit OnDevice(int32_t ordinal) {
    cudaGetDevice(&before_);
    error_ = cudaSetDevice(ordinal);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  cudaError_t error_;
};

}  // namespace mok
