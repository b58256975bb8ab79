#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/epilogue.cuh"
#include "sm90/forward.h"
#include "sm90/load.cuh"
#include "sm90/multiply.cuh"

namespace mok::sm90 {
namespace {

// setmaxnreg: 168 registers a thread at entry, moved from the loading to the multiplying threads.
constexpr int kLoaderRegisters = 72;
constexpr int kMultiplierRegisters = 216;

// One of the two warpgroups that multiply.
template <int kCluster>
class Multiplier {
 public:
  __device__ Multiplier(const ForwardParams& params, SharedStorage& shared, int block_in_cluster,
                        int half)
      : params_(params),
        shared_(shared),
        block_(block_in_cluster),
        half_(half),
        warp_(threadIdx.x % kWarpgroup / kWarp),
        lane_(threadIdx.x % kWarp),
        watch_{global_nanoseconds() + params.timeout_ns} {}

  __device__ void run(int first_item, int stride) {
    const int count = *params_.item_count;
    int item_index = 0;
    for (int i = first_item; i < count; i += stride) {
      await_stage();
      // Whoever has not waited to the end may not read what is in shared memory.
      const WorkItem item = watch_.late ? params_.items[i] : shared_.items[item_index];
      item_index = (item_index + 1) % kItems;
      const int parts = parts_of(item, params_.gate_up_columns, params_.down_columns, kCluster);
#pragma unroll 1
      for (int part = 0; part < parts; ++part) {
        if (part > 0) {
          await_stage();
        }
        const BlockWork work = block_work(item, kCluster, block_, part);
        float accumulators[kAccumulators];
        multiply_tiles(work, accumulators);
        if (work.product == Product::kGateUp) {
          store_gate_up(work, accumulators);
        } else {
          push_down(work, accumulators);
        }
      }
    }
    announce_hidden();
    if (watch_.late) {
      *params_.fault = 1;
    }
  }

 private:
  // Waits for the first stage of an item. Whatever it takes to fill it may depend on the hidden
  // rows that have not been announced.
  __device__ void await_stage() {
    const TransactionBarrier& full = shared_.full[cursor_.index];
    if (!__all_sync(~0u, full.test_wait(cursor_.parity))) {
      announce_hidden();
      wait(full, cursor_.parity, watch_);
    }
  }

  // A block's two tiles go to a warpgroup each; of a single tile, each takes half the columns.
  __device__ void multiply_tiles(const BlockWork& work, float (&accumulators)[kAccumulators]) {
    const int depth = work.product == Product::kDown ? params_.inner : params_.hidden;
    const int steps = depth / kBlockDepth;
    const auto announce = [&] { announce_hidden(); };
    if (work.tiles == kBlockTiles) {
      multiply<kBlockColumns, kCluster>(shared_, cursor_, watch_, steps, half_, 0, accumulators,
                                        announce);
    } else {
      multiply<kBlockColumns / 2, kCluster>(shared_, cursor_, watch_, steps, 0, half_, accumulators,
                                            announce);
    }
  }

  __device__ int tile_of(const BlockWork& work) const {
    return work.tile + (work.tiles == kBlockTiles ? half_ : 0);
  }

  __device__ void store_gate_up(const BlockWork& work, const float (&accumulators)[kAccumulators]) {
    if (work.column_block >= params_.gate_up_columns) {
      return;
    }
    const bool two_tiles = work.tiles == kBlockTiles;
    const int tile = tile_of(work);
    const int ring_row = tile % params_.ring_tiles * kTileRows + warp_ * kWarpRows;
    const int column =
        work.column_block * (kBlockColumns / 2) + (two_tiles ? 0 : half_ * kPanelColumns);
    announce_hidden();  // if there was no occasion; the staging buffers are free then
#pragma unroll
    for (int panel = 0; panel < kPanels / 2; ++panel) {
      if (panel == 0 || two_tiles) {
        Element* const buffer = staging(panel);
        stage_panel(buffer, [&](int i) {
          const int gate = panel * 2 * kPanelAccumulators + i;
          return swiglu(accumulators[gate], accumulators[gate + kPanelAccumulators], params_.clamp);
        });
        store_hidden(&params_.hidden_warps, buffer, column + panel * kPanelColumns, ring_row);
      }
    }
    unannounced_ = params_.hidden_ready + tile;
    // Four warps write a tile of two panels, or eight warps a panel each: equal weight in sum.
    unannounced_warps_ = two_tiles ? 2 : 1;
  }

  __device__ void push_down(const BlockWork& work, const float (&accumulators)[kAccumulators]) {
    const bool two_tiles = work.tiles == kBlockTiles;
    Element* rows[kStores];
    read_homes(two_tiles ? half_ * kTileRows : 0, rows);
    if (work.column_block >= params_.down_columns) {
      return;
    }
    release_ring(work);
    const int column =
        work.column_block * kBlockColumns + (two_tiles ? 0 : half_ * (kBlockColumns / 2));
    announce_hidden();
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const int panel_column = column + panel * kPanelColumns;
      if ((panel < kPanels / 2 || two_tiles) && panel_column < params_.hidden) {
        Element* const buffer = staging(panel % kStagingBuffers);
        stage_panel(buffer, [&](int i) { return accumulators[panel * kPanelAccumulators + i]; });
        push_rows(buffer, panel_column, rows);
      }
    }
    __syncwarp();
  }

  // Where the rows go that this thread will store.
  __device__ void read_homes(int first_row, Element* (&rows)[kStores]) {
    Element* const* const homes =
        shared_.homes[home_cursor_.index] + first_row + warp_ * kWarpRows + lane_ / 8;
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      rows[i] = watch_.late ? nullptr : homes[i * kRowsPerStore];
    }
    __syncwarp();
    if (lane_ == 0) {
      shared_.homes_read[home_cursor_.index].arrive();
    }
    home_cursor_.advance();
  }

  // Tells the readers of the last hidden rows that these have arrived. Put off until there is
  // something to do while the stores end, but never past a wait: the item waited for may itself
  // wait for these rows.
  __device__ void announce_hidden() {
    if (unannounced_ != nullptr) {
      if (lane_ == 0) {
        wait_for_bulk_stores();
        fence_proxies_global();
        add_release(unannounced_, unannounced_warps_);
      }
      unannounced_ = nullptr;
      __syncwarp();
    }
  }

  // This block has read the tile's hidden rows for one column block.
  __device__ void release_ring(const BlockWork& work) {
    if (half_ == 0 && warp_ == 0 && lane_ < work.tiles &&
        work.tile + lane_ + params_.ring_tiles < *params_.tile_count) {
      add_release(params_.down_done + work.tile + lane_, 1);
    }
  }

  __device__ Element* staging(int buffer) const {
    return shared_.staging[half_ * (kWarpgroup / kWarp) + warp_][buffer];
  }

  const ForwardParams& params_;
  SharedStorage& shared_;
  const int block_;
  const int half_;
  const int warp_;
  const int lane_;
  StageCursor cursor_;
  HomeCursor home_cursor_;
  Watch watch_;
  uint32_t* unannounced_ = nullptr;
  uint32_t unannounced_warps_ = 0;
};

template <int kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int block_in_cluster = kCluster == 1 ? 0 : cute::block_rank_in_cluster();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(kFillArrivals);
      shared.empty[stage].init(kConsumerWarps * kCluster);
    }
    for (int home = 0; home < kHomes; ++home) {
      shared.homes_read[home].init(kConsumerWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    cute::cluster_sync();
  }

  const int first_item = blockIdx.x / kCluster;
  const int stride = gridDim.x / kCluster;
  const int warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kLoaderRegisters>();
    Loader<kCluster>(params, shared, block_in_cluster).run(first_item, stride);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kMultiplierRegisters>();
    Multiplier<kCluster>(params, shared, block_in_cluster, warpgroup - 1).run(first_item, stride);
  }

  // No block may end while another can still write to its shared memory. After a fault copies may
  // be under way that nobody has waited for.
  if (*static_cast<volatile int32_t*>(params.fault) != 0) {
    __nanosleep(1000000);
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
