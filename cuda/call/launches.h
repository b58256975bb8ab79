#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace mok {

// Collects the first error of a sequence of launches.
class Launches {
 public:
  void operator()(const char* what, cudaError_t error) {
    if (error != cudaSuccess && first_.empty()) {
      first_ = std::string(what) + ": " + cudaGetErrorString(error);
    }
  }
  bool failed() const { return !first_.empty(); }
  // What went wrong, or nothing.
  const std::string& result() const { return first_; }

 private:
  std::string first_;
};

}  // namespace mok
