#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include <algorithm>
#include <cute/arch/cluster_sm90.hpp>
#include <limits>

#include "device/clock.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/schedule.cuh"

// A persistent kernel, one block per SM: who does what, and its launch. `Roles` names the
// parameters and the classes of the roles: Scheduler, Loader, Multiplier, and a function pull.
namespace mok::sm90 {

// setmaxnreg: 168 registers a thread at entry, moved to the threads that multiply.
constexpr int kFeederRegisters = 72;
constexpr int kMultiplierRegisters = 216;

// Warps of the first warpgroup by role; the others multiply.
constexpr int kScheduler = 0;
constexpr int kPuller = 1;
constexpr int kFirstLoader = 2;

// A millisecond of this kernel's own time, counted in pieces: the clock goes on while another
// process has the GPU, and copies do not.
__device__ inline void await_copies() {
  for (int piece = 0; piece < 1000; ++piece) {
    for (const uint64_t begin = global_nanoseconds(); global_nanoseconds() < begin + 1000;) {
    }
  }
}

template <typename Roles>
__global__ void __launch_bounds__(kThreads, 1)
    persistent_kernel(const __grid_constant__ typename Roles::Params params) {
  extern __shared__ char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int block_in_cluster = cute::block_rank_in_cluster();
  if (threadIdx.x == 0) {
    init_barriers(shared, kHandingLanesOf<typename Roles::Params>);
  }
  cute::cluster_sync();

  const int warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kFeederRegisters>();
    const int warp = cutlass::canonical_warp_idx_sync();
    if (warp == kScheduler) {
      typename Roles::Scheduler(params, shared, block_in_cluster).run();
    } else if (warp == kPuller) {
      Roles::pull(params, blockIdx.x, gridDim.x);
    } else {
      typename Roles::Loader(params, shared, block_in_cluster, warp - kFirstLoader).run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kMultiplierRegisters>();
    typename Roles::Multiplier(params, shared, block_in_cluster, warpgroup - 1).run();
  }

  // No block may end while another can still write to its shared memory. After a fault copies may
  // be under way that nobody has waited for.
  if (__any_sync(kAllLanes, *static_cast<volatile int32_t*>(params.fault) != 0)) {
    await_copies();
  }
  cute::cluster_sync();
}

inline cudaLaunchConfig_t launch_config(cudaLaunchAttribute* attribute, int clusters,
                                        cudaStream_t stream) {
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * kCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(SharedStorage);
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

// Loads the kernels and finds how many clusters of any of them fit the device at once.
template <typename... Roles>
cudaError_t prepare(int* clusters) {
  cudaError_t error = cudaSuccess;
  *clusters = std::numeric_limits<int>::max();
  const auto prepare_one = [&](auto kernel) {
    if (error == cudaSuccess) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   sizeof(SharedStorage));
    }
    if (error == cudaSuccess) {
      cudaLaunchAttribute attribute;
      const cudaLaunchConfig_t config = launch_config(&attribute, 1, nullptr);
      int fit = 0;
      error = cudaOccupancyMaxActiveClusters(&fit, kernel, &config);
      *clusters = std::min(*clusters, fit);
    }
  };
  (prepare_one(persistent_kernel<Roles>), ...);
  return error;
}

template <typename Roles>
cudaError_t launch(const typename Roles::Params& params, int clusters, cudaStream_t stream) {
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = launch_config(&attribute, clusters, stream);
  return cudaLaunchKernelEx(&config, persistent_kernel<Roles>, params);
}

}  // namespace mok::sm90
