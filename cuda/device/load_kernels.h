#pragma once

#include <cuda_runtime_api.h>

namespace mok {

// Loads kernels onto the current device. Left to the first launch, loading may wait for a kernel
// that waits for a peer.
template <typename... Kernels>
cudaError_t load_kernels(Kernels... kernels) {
  cudaError_t error = cudaSuccess;
  const auto load = [&](auto kernel) {
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) {
      error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    }
  };
  (load(kernels), ...);
  return error;
}

}  // namespace mok
