#pragma once

#include <cstdint>

#include "device/clock.cuh"
#include "device/warp.cuh"
#include "sm90/epilogue.cuh"
#include "sm90/forward.h"
#include "sm90/multiply.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"

// One of the two warpgroups that multiply: takes items as the scheduling warp hands them out, and
// sends their products on, to the ring of hidden rows or to where output rows go.
namespace mok::sm90 {

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

  __device__ void run() {
    AssignmentCursor cursor;
    while (true) {
      await(shared_.assigned[cursor.index], cursor.parity);
      // All threads of a warpgroup stop at the same item, because its products need all of them.
      // Whoever has not waited to the end may not read what is in shared memory.
      if (any_of_warpgroup(1 + half_, watch_.late)) {
        *params_.fault = 1;
        break;
      }
      const Assignment& assignment = shared_.assignments[cursor.index];
      const WorkItem item = assignment.item;
      if (item.flags & WorkItem::kStopFlag) {
        break;
      }
      const BlockWork work = block_work(item, block_);
      if (work.product == Product::kGateUp) {
        __syncwarp();
        arrive_in_cluster<kCluster>(shared_.taken[cursor.index]);
      }
      await(shared_.full[cursor_.index], cursor_.parity);
      float accumulators[kAccumulators];
      multiply_tiles(work, accumulators);
      if (work.product == Product::kGateUp) {
        store_gate_up(work, accumulators);
      } else {
        Element* rows[kStores];
        read_homes(work, assignment, rows);
        arrive_in_cluster<kCluster>(shared_.taken[cursor.index]);
        push_down(work, rows, accumulators);
      }
      cursor.advance();
    }
    announce_hidden();
  }

 private:
  // Waits for an item or its first stage. Whatever it takes may depend on the hidden rows that have
  // not been announced.
  __device__ void await(const Barrier& barrier, uint32_t parity) {
    if (!__all_sync(kAllLanes, barrier.test_wait(parity))) {
      announce_hidden();
      wait(barrier, parity, watch_);
    }
  }

  // A block's two tiles go to a warpgroup each; of a single tile, each takes half the columns.
  __device__ void multiply_tiles(const BlockWork& work, float (&accumulators)[kAccumulators]) {
    const int depth = work.product == Product::kDown ? params_.inner : params_.hidden;
    const int steps = depth / kBlockDepth;
    const auto announce = [&] { announce_hidden(); };
    if (work.tiles == kBlockTiles) {
      multiply<kBlockColumns, kCluster, Major::K, Major::MN, false>(
          shared_, cursor_, watch_, steps, half_, 0, accumulators, announce);
    } else {
      multiply<kBlockColumns / 2, kCluster, Major::K, Major::MN, false>(
          shared_, cursor_, watch_, steps, 0, half_, accumulators, announce);
    }
  }

  __device__ int tile_of(const BlockWork& work) const {
    return work.tile + (work.tiles == kBlockTiles ? half_ : 0);
  }

  __device__ void store_gate_up(const BlockWork& work, float (&accumulators)[kAccumulators]) {
    if (work.column_block >= params_.gate_up_columns) {
      return;
    }
    const bool two_tiles = work.tiles == kBlockTiles;
    const int tile = tile_of(work);
    const int ring_row = tile % params_.ring_tiles * kTileRows + warp_ * kWarpRows;
    const int column =
        work.column_block * (kBlockColumns / 2) + (two_tiles ? 0 : half_ * kPanelColumns);
    announce_hidden();  // if there was no occasion; the staging buffers are free then
    if (params_.clamp.is_finite()) {
      keep_sides_of_clamp(accumulators, params_.clamp);
    }
#pragma unroll
    for (int panel = 0; panel < kPanels / 2; ++panel) {
      if (panel == 0 || two_tiles) {
        const float* const gates = accumulators + panel * 2 * kPanelAccumulators;
        const float* const ups = gates + kPanelAccumulators;
        const int panel_column = column + panel * kPanelColumns;
        Element* const buffer = staging(panel);
#pragma unroll
        for (int group = 0; group < kPanelGroups; ++group) {
          stage_group(buffer, group, [&](int i) {
            return swiglu_pair(pack_pair(gates, group, i), pack_pair(ups, group, i),
                               params_.clamp.limit);
          });
        }
        store_hidden(&params_.hidden_warps, buffer, panel_column, ring_row);
        if (tile < params_.saved_tiles && panel_column < params_.inner) {
          save_panel(gates, ups, tile, panel_column);
        }
      }
    }
    unannounced_ = params_.hidden_ready + tile;
    // Four warps write a tile of two panels, or eight warps a panel each: equal weight in sum.
    unannounced_warps_ = two_tiles ? 2 : 1;
  }

  __device__ void push_down(const BlockWork& work, Element* const (&rows)[kStores],
                            const float (&accumulators)[kAccumulators]) {
    const bool two_tiles = work.tiles == kBlockTiles;
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
        const float* const values = accumulators + panel * kPanelAccumulators;
#pragma unroll
        for (int group = 0; group < kPanelGroups; ++group) {
          stage_group(buffer, group, [&](int i) { return pack_pair(values, group, i); });
        }
        push_rows(buffer, panel_column, rows);
      }
    }
    __syncwarp();
  }

  // Keeps this thread's pre-activations of a panel; see ForwardParams::saved.
  __device__ void save_panel(const float* gates, const float* ups, int tile, int column) const {
    constexpr int kPanelVectors = kTileRows * kPanelColumns / 8;
    const int64_t panel = int64_t{tile} * (params_.inner / kPanelColumns) + column / kPanelColumns;
    uint4* const place = reinterpret_cast<uint4*>(params_.saved) + panel * 2 * kPanelVectors +
                         warp_ * kPanelGroups * kWarp + lane_;
#pragma unroll
    for (int group = 0; group < kPanelGroups; ++group) {
      __stcs(place + group * kWarp, pack_group(gates, group));
      __stcs(place + kPanelVectors + group * kWarp, pack_group(ups, group));
    }
  }

  // Where the rows go that this thread will store.
  __device__ void read_homes(const BlockWork& work, const Assignment& assignment,
                             Element* (&rows)[kStores]) const {
    const int first_row = work.tiles == kBlockTiles ? half_ * kTileRows : 0;
    Element* const* const homes = assignment.rows + first_row + warp_ * kWarpRows + lane_ / 8;
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      rows[i] = watch_.late ? nullptr : homes[i * kRowsPerStore];
    }
    __syncwarp();
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
  Watch watch_;
  uint32_t* unannounced_ = nullptr;
  uint32_t unannounced_warps_ = 0;
};

}  // namespace mok::sm90
