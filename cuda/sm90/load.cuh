#pragma once

#include <cutlass/cutlass.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "device/clock.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"

// The loading warps. Weights and rings come by tensor copies; what is indexed by tokens is gathered
// from where it lies, 16 bytes a thread.
namespace mok::sm90 {

constexpr uint64_t kCacheNormally = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
constexpr uint32_t kPanelBytes = kBlockDepth * kPanelColumns * kBytesPerElement;
constexpr uint32_t kTileBytes = kTileRows * kBlockDepth * kBytesPerElement;

// Eight lanes copy the 128 bytes that a row contributes to a stage; the warps cover 8 rows at a
// time.
constexpr int kLanesPerRow = 8;
constexpr int kRowsAtOnce = kLoadWarps * kWarp / kLanesPerRow;
constexpr int kGathers = kBlockRows / kRowsAtOnce;

// A box of a matrix.
struct Box {
  const CUtensorMap* map;
  int column;
  int row;
};

// What the kernels' loading warps have in common.
template <typename Params>
class LoaderBase {
 public:
  // `warp` is one of kLoadWarps.
  __device__ LoaderBase(const Params& params, SharedStorage& shared, int block_in_cluster, int warp)
      : params_(params),
        shared_(shared),
        block_(block_in_cluster),
        warp_(warp),
        thread_(warp * kWarp + threadIdx.x % kWarp),
        watch_{global_nanoseconds() + params.timeout_ns} {}

 protected:
  // Calls load(item, begin_tile, end_tile) for each item, whose rows have been read.
  template <typename Load>
  __device__ void load_items(const Load& load) {
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
      const int begin_tile = assignment.begin_tile;
      const int end_tile = assignment.end_tile;
      read_rows(assignment.rows);
      arrive_in_cluster(shared_.taken[cursor.index]);
      fence_proxies_global();  // the rings' writers and readers have been waited for by another
                               // thread
      load(item, begin_tile, end_tile);
      cursor.advance();
    }
  }

  // Waits until a stage is free, and announces the bytes of its tensor copies; if it also gets rows
  // that are gathered, its arrivals follow with them. All threads wait, and no stage is full
  // without each warp, lest one meets a phase that only looks like the one it waits for. False
  // after a fault: no copies are started then.
  __device__ bool begin_stage(uint32_t bytes, bool gathers) {
    wait(shared_.empty[cursor_.index], cursor_.parity ^ 1, watch_);
    if (__any_sync(kAllLanes, watch_.late)) {
      return false;
    }
    if (cute::elect_one_sync()) {
      if (warp_ == 0) {
        shared_.full[cursor_.index].arrive_and_expect_tx(bytes);
      }
      if (!gathers) {
        arrive_many(full_word(), kWarp);
      }
    }
    return true;
  }

  // This warp's panels of B, where `box(panel)` says. Blocks that need the same ones copy a share
  // each for all.
  template <typename FindBox>
  __device__ void copy_panels(const BlockWork& work, const FindBox& box) {
    if (!cute::elect_one_sync()) {
      return;
    }
    const bool multicast = work.shares_weights;
    constexpr int kShare = kPanels / kCluster;
    const int first = (multicast ? block_ * kShare : 0) + warp_;
    const int end = multicast ? (block_ + 1) * kShare : kPanels;
    for (int panel = first; panel < end; panel += kLoadWarps) {
      const Box from = box(panel);
      Element* const destination = shared_.b[cursor_.index][panel];
      if (multicast) {
        constexpr uint16_t kAllBlocks = (1 << kCluster) - 1;
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(from.map, full_word(), kAllBlocks, kCacheNormally,
                                               destination, from.column, from.row);
      } else {
        cute::SM90_TMA_LOAD_2D::copy(from.map, full_word(), kCacheNormally, destination,
                                     from.column, from.row);
      }
    }
  }

  // This warp's tile of A, where `box` says, if the block has so many.
  __device__ void copy_tile(const BlockWork& work, const Box& box) {
    if (warp_ < work.tiles && cute::elect_one_sync()) {
      cute::SM90_TMA_LOAD_2D::copy(box.map, full_word(), kCacheNormally,
                                   shared_.a[cursor_.index] + warp_ * kTileRows * kBlockDepth,
                                   box.column, box.row);
    }
  }

  // A with the contraction along the rows: 64 columns of every row of the block.
  __device__ void gather_rows(const BlockWork& work, int step) {
    const bool two_tiles = work.tiles == kBlockTiles;
#pragma unroll
    for (int i = 0; i < kGathers; ++i) {
      if (i < kGathers / kBlockTiles || two_tiles) {
        copy_async_16(destination_of(i), rows_[i] + step * kBlockDepth, true);
      }
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(full_word());
  }

  // Tokens times gate and up, whose panels take turns.
  __device__ void load_gate_up(const BlockWork& work) {
    const int steps = params_.hidden / kBlockDepth;
    for (int step = 0; step < steps; ++step) {
      if (!begin_stage(kPanels * kPanelBytes, true)) {
        return;
      }
      copy_panels(work, [&](int panel) {
        return Box{panel % 2 == 0 ? &params_.gate : &params_.up,
                   work.column_block * (kBlockColumns / 2) + panel / 2 * kPanelColumns,
                   work.expert * params_.hidden + step * kBlockDepth};
      });
      gather_rows(work, step);
      cursor_.advance();
    }
  }

  // The 16 bytes of a stage's A, in the 128-byte swizzle, that this thread copies as its i-th.
  __device__ Element* destination_of(int i) const {
    const int row = thread_ / kLanesPerRow;
    const int eighth = (thread_ ^ row) % kLanesPerRow;
    return shared_.a[cursor_.index] + (row + i * kRowsAtOnce) * kBlockDepth + eighth * 8;
  }

  __device__ uint64_t* full_word() const {
    return reinterpret_cast<uint64_t*>(&shared_.full[cursor_.index]);
  }

  const Params& params_;
  SharedStorage& shared_;
  const int block_;
  const int warp_;
  const int thread_;
  StageCursor cursor_;
  Watch watch_;
  const Element* rows_[kGathers];

 private:
  // Where this thread's share of each row begins, if the item gathers along rows; else nothing that
  // is used.
  __device__ void read_rows(const Element* const* rows) {
#pragma unroll
    for (int i = 0; i < kGathers; ++i) {
      rows_[i] = rows[thread_ / kLanesPerRow + i * kRowsAtOnce] + thread_ % kLanesPerRow * 8;
    }
    __syncwarp();
  }
};

}  // namespace mok::sm90
