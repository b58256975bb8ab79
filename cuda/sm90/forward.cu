#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/forward.h"
#include "sm90/load.cuh"
#include "sm90/multiplier.cuh"
#include "sm90/pull.cuh"
#include "sm90/schedule.cuh"

namespace mok::sm90 {
namespace {

// setmaxnreg: 168 registers a thread at entry, moved to the threads that multiply.
constexpr int kFeederRegisters = 72;
constexpr int kMultiplierRegisters = 216;

// Warps of the first warpgroup by role; the others multiply.
constexpr int kScheduler = 0;
constexpr int kPuller = 1;
constexpr int kFirstLoader = 2;

template <int kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int block_in_cluster = kCluster == 1 ? 0 : cute::block_rank_in_cluster();
  if (threadIdx.x == 0) {
    init_barriers<kCluster>(shared);
  }
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    cute::cluster_sync();
  }

  const int warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kFeederRegisters>();
    const int warp = cutlass::canonical_warp_idx_sync();
    if (warp == kScheduler) {
      Scheduler<kCluster>(params, shared, block_in_cluster).run();
    } else if (warp == kPuller) {
      pull_tokens(params, blockIdx.x, gridDim.x);
    } else {
      Loader<kCluster>(params, shared, block_in_cluster, warp - kFirstLoader).run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kMultiplierRegisters>();
    Multiplier<kCluster>(params, shared, block_in_cluster, warpgroup - 1).run();
  }

  // No block may end while another can still write to its shared memory. After a fault copies may
  // be under way that nobody has waited for.
  if (*static_cast<volatile int32_t*>(params.fault) != 0) {
    for (const uint64_t begin = global_nanoseconds(); global_nanoseconds() < begin + 1000000;) {
    }
  }
  if constexpr (kCluster > 1) {
    cute::cluster_sync();
  }
}

cudaLaunchConfig_t launch_config(cudaLaunchAttribute* attribute, int clusters,
                                 cudaStream_t stream) {
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim = {kForwardCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * kForwardCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(SharedStorage);
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

}  // namespace

cudaError_t prepare_forward(int* clusters) {
  const auto kernel = forward_kernel<kForwardCluster>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedStorage));
  if (error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = launch_config(&attribute, 1, nullptr);
  return cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
}

cudaError_t launch_forward(const ForwardParams& params, int clusters, cudaStream_t stream) {
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = launch_config(&attribute, clusters, stream);
  return cudaLaunchKernelEx(&config, forward_kernel<kForwardCluster>, params);
}

}  // namespace mok::sm90
