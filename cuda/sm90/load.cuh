#pragma once

#include <cutlass/cutlass.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/plan.h"
#include "sm90/forward.h"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"

// The loading warps. Weights and hidden rows come by tensor copies; tokens are gathered row by
// row from where they lie, 16 bytes a thread.
namespace mok::sm90 {

constexpr uint64_t kCacheNormally = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
constexpr uint32_t kPanelBytes = kBlockDepth * kPanelColumns * kBytesPerElement;
constexpr uint32_t kTileBytes = kTileRows * kBlockDepth * kBytesPerElement;

// Eight lanes copy the 128 bytes that a row contributes to a stage; the warps cover 8 rows at a
// time.
constexpr int kLanesPerRow = 8;
constexpr int kRowsAtOnce = kLoadWarps * kWarp / kLanesPerRow;
constexpr int kGathers = kBlockRows / kRowsAtOnce;

template <int kCluster>
class Loader {
 public:
  // `warp` is one of kLoadWarps.
  __device__ Loader(const ForwardParams& params, SharedStorage& shared, int block_in_cluster,
                    int warp)
      : params_(params),
        shared_(shared),
        block_(block_in_cluster),
        warp_(warp),
        thread_(warp * kWarp + threadIdx.x % kWarp),
        watch_{global_nanoseconds() + params.timeout_ns} {}

  __device__ void run() {
    AssignmentCursor cursor;
    while (true) {
      wait(shared_.assigned[cursor.index], cursor.parity, watch_);
      // After a fault those who multiply carry on with what is there, since a warpgroup's products
      // need all of its threads.
      if (__any_sync(kAllLanes, watch_.late)) {
        *params_.fault = 1;
        return;
      }
      const Assignment& assignment = shared_.assignments[cursor.index];
      const WorkItem item = assignment.item;
      if (item.flags & WorkItem::kStopFlag) {
        return;
      }
      read_rows(assignment.rows);
      arrive_in_cluster<kCluster>(shared_.taken[cursor.index]);
      const BlockWork work = block_work(item, block_);
      if (work.product == Product::kGateUp) {
        load_gate_up(work);
      } else {
        load_down(work);
      }
      cursor.advance();
    }
  }

 private:
  __device__ void load_gate_up(const BlockWork& work) {
    fence_proxies_global();  // the ring's last readers have been waited for, by another thread
    const Panels panels = panels_of(work);
    const int steps = params_.hidden / kBlockDepth;
    for (int step = 0; step < steps; ++step) {
      if (!begin_stage(kPanels * kPanelBytes, 0)) {
        return;
      }
      copy(panels, step);
      gather(work, step);
      cursor_.advance();
    }
  }

  __device__ void load_down(const BlockWork& work) {
    fence_proxies_global();  // the hidden rows' arrival has been waited for, by another thread
    const Panels panels = panels_of(work);
    const int tile = (work.tile + warp_) % params_.ring_tiles;
    const int steps = params_.inner / kBlockDepth;
    const uint32_t bytes = kPanels * kPanelBytes + work.tiles * kTileBytes;
    for (int step = 0; step < steps; ++step) {
      if (!begin_stage(bytes, kFillArrivals - 1)) {
        return;
      }
      copy(panels, step);
      if (warp_ < work.tiles && cute::elect_one_sync()) {
        Element* const destination = shared_.a[cursor_.index] + warp_ * kTileRows * kBlockDepth;
        cute::SM90_TMA_LOAD_2D::copy(&params_.hidden_tiles, full_word(), kCacheNormally,
                                     destination, step * kBlockDepth, tile * kTileRows);
      }
      cursor_.advance();
    }
  }

  // Waits until a stage is free, and announces the bytes of its tensor copies. All threads wait,
  // lest one meets a phase that only looks like the one it waits for. False after a fault: no
  // copies are started then.
  __device__ bool begin_stage(uint32_t bytes, uint32_t further_arrivals) {
    wait(shared_.empty[cursor_.index], cursor_.parity ^ 1, watch_);
    if (__any_sync(kAllLanes, watch_.late)) {
      return false;
    }
    if (warp_ == 0 && cute::elect_one_sync()) {
      shared_.full[cursor_.index].arrive_and_expect_tx(bytes);
      if (further_arrivals > 0) {
        arrive_many(full_word(), further_arrivals);
      }
    }
    return true;
  }

  // The panels of weights that this warp copies: every kLoadWarps-th one from `first` on. Blocks
  // that need the same panels copy a share each for all.
  struct Panels {
    const CUtensorMap* map;
    int first;
    int count;
    int column;       // of the first
    int column_step;  // from one to the next
    int row;
    bool multicast;
  };

  __device__ Panels panels_of(const BlockWork& work) const {
    static_assert(kLoadWarps == 2, "a warp takes the panels of gate, the other those of up");
    const bool multicast = kCluster > 1 && work.shares_weights;
    constexpr int kShare = kPanels / kCluster;
    Panels panels;
    panels.first = (multicast ? block_ * kShare : 0) + warp_;
    panels.count = (multicast ? kShare : kPanels) / kLoadWarps;
    panels.multicast = multicast;
    if (work.product == Product::kGateUp) {
      // Panels of gate and up take turns, and so do the warps.
      panels.map = warp_ % 2 == 0 ? &params_.gate : &params_.up;
      panels.column = work.column_block * (kBlockColumns / 2) + panels.first / 2 * kPanelColumns;
      panels.column_step = kLoadWarps / 2 * kPanelColumns;
      panels.row = work.expert * params_.hidden;
    } else {
      panels.map = &params_.down;
      panels.column = work.column_block * kBlockColumns + panels.first * kPanelColumns;
      panels.column_step = kLoadWarps * kPanelColumns;
      panels.row = work.expert * params_.inner;
    }
    return panels;
  }

  __device__ void copy(const Panels& panels, int step) {
    if (!cute::elect_one_sync()) {
      return;
    }
    Element* destination = shared_.b[cursor_.index][panels.first];
    int column = panels.column;
    const int row = panels.row + step * kBlockDepth;
    for (int i = 0; i < panels.count; ++i) {
      if (panels.multicast) {
        constexpr uint16_t kAllBlocks = (1 << kCluster) - 1;
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(panels.map, full_word(), kAllBlocks, kCacheNormally,
                                               destination, column, row);
      } else {
        cute::SM90_TMA_LOAD_2D::copy(panels.map, full_word(), kCacheNormally, destination, column,
                                     row);
      }
      destination += kLoadWarps * kBlockDepth * kPanelColumns;
      column += panels.column_step;
    }
  }

  // Where this thread's share of each row begins; null for padding.
  __device__ void read_rows(const Element* const* rows) {
#pragma unroll
    for (int i = 0; i < kGathers; ++i) {
      const Element* const row = rows[thread_ / kLanesPerRow + i * kRowsAtOnce];
      rows_[i] = row == nullptr ? nullptr : row + thread_ % kLanesPerRow * 8;
    }
    __syncwarp();
  }

  // Rows of 128 bytes whose eighths are permuted as the 128-byte swizzle wants.
  __device__ void gather(const BlockWork& work, int step) {
    const int row = thread_ / kLanesPerRow;
    const int eighth = (thread_ ^ row) % kLanesPerRow;
    Element* const destination = shared_.a[cursor_.index] + row * kBlockDepth + eighth * 8;
    const bool two_tiles = work.tiles == kBlockTiles;
#pragma unroll
    for (int i = 0; i < kGathers; ++i) {
      if (i < kGathers / kBlockTiles || two_tiles) {
        copy_async_16(destination + i * kRowsAtOnce * kBlockDepth, rows_[i] + step * kBlockDepth,
                      rows_[i] != nullptr);
      }
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(full_word());
  }

  __device__ uint64_t* full_word() const {
    return reinterpret_cast<uint64_t*>(&shared_.full[cursor_.index]);
  }

  const ForwardParams& params_;
  SharedStorage& shared_;
  const int block_;
  const int warp_;
  const int thread_;
  StageCursor cursor_;
  Watch watch_;
  const Element* rows_[kGathers];
};

}  // namespace mok::sm90
