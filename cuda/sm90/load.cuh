#pragma once

#include <cutlass/cutlass.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/plan.h"
#include "sm90/forward.h"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"

// The loading warpgroup. Weights and hidden rows come by tensor copies;
// tokens are gathered row by row from where they lie, 16 bytes a thread.
namespace mok::sm90 {

constexpr uint64_t kCacheNormally = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
constexpr uint32_t kPanelBytes = kBlockDepth * kPanelColumns * kBytesPerElement;
constexpr uint32_t kTileBytes = kTileRows * kBlockDepth * kBytesPerElement;

// Eight lanes copy the 128 bytes that a row contributes to a stage; the warpgroup covers 16 rows
// at a time.
constexpr int kLanesPerRow = 8;
constexpr int kRowsAtOnce = kWarpgroup / kLanesPerRow;
constexpr int kGathers = kBlockRows / kRowsAtOnce;

constexpr int kLoadWarps = kWarpgroup / kWarp;

template <int kCluster>
class Loader {
 public:
  __device__ Loader(const ForwardParams& params, SharedStorage& shared, int block_in_cluster)
      : params_(params),
        shared_(shared),
        block_(block_in_cluster),
        thread_(threadIdx.x % kWarpgroup),
        warp_(cutlass::canonical_warp_idx_sync() % kLoadWarps),
        watch_{global_nanoseconds() + params.timeout_ns} {}

  __device__ void run(int first_item, int stride) {
    const int count = *params_.item_count;
    if (first_item >= count) {
      return;
    }
    WorkItem next = params_.items[first_item];
    look_up_rows(next);
    // After a fault no copies are started; those who multiply carry on with what is there, since
    // a warpgroup's products need all of its threads.
    for (int i = first_item; i < count && !__any_sync(~0u, watch_.late); i += stride) {
      const WorkItem item = next;
      const bool is_down = item.flags & WorkItem::kDownFlag;
      Element* home = nullptr;
      if (is_down) {
        home = find_home();
      } else {
        find_rows();
      }
      if (i + stride < count) {
        next = params_.items[i + stride];
        look_up_rows(next);
      }
      const int parts = parts_of(item, params_.gate_up_columns, params_.down_columns, kCluster);
      for (int part = 0; part < parts; ++part) {
        const BlockWork work = block_work(item, kCluster, block_, part);
        if (is_down) {
          load_down(work, home, item, part == 0);
        } else {
          load_gate_up(work, item, part == 0);
        }
      }
      item_index_ = (item_index_ + 1) % kItems;
    }
    if (watch_.late) {
      *params_.fault = 1;
    }
  }

 private:
  // The tensor copies of a stage are spread over the warps: issuing one takes a while, and every
  // warp has rows to gather. Which one, if any, this warp issues at every step of an item:
  struct TensorCopy {
    const CUtensorMap* map = nullptr;
    int column;
    int row;
    int column_step = 0;
    int row_step = 0;
    Element* destination;  // in stage 0
    int stage_elements;
    bool multicast = false;
  };

  __device__ void load_gate_up(const BlockWork& work, const WorkItem& item, bool is_new) {
    if (warp_ == 0) {
      wait_for_ring(work);
    }
    const TensorCopy panel = panel_copy(work);
    const int steps = params_.hidden / kBlockDepth;
    for (int step = 0; step < steps; ++step) {
      wait(shared_.empty[cursor_.index], cursor_.parity ^ 1, watch_);
      if (warp_ == 0 && cute::elect_one_sync()) {
        if (step == 0 && is_new) {
          shared_.items[item_index_] = item;  // for those who multiply, with its first stage
        }
        shared_.full[cursor_.index].arrive_and_expect_tx(kPanels * kPanelBytes);
      }
      copy(panel, step);
      gather(work, step);
      cursor_.advance();
    }
  }

  __device__ void load_down(const BlockWork& work, Element* home, const WorkItem& item,
                            bool is_new) {
    wait(shared_.homes_read[home_cursor_.index], home_cursor_.parity ^ 1, watch_);
    shared_.homes[home_cursor_.index][thread_] = home;
    home_cursor_.advance();
    const TensorCopy panel = panel_copy(work);
    const TensorCopy rows = hidden_copy(work);
    const int steps = params_.inner / kBlockDepth;
    const uint32_t bytes = kPanels * kPanelBytes + work.tiles * kTileBytes;
    for (int step = 0; step < steps; ++step) {
      // All threads keep in step, lest one meets a phase that only looks like the one it waits for.
      wait(shared_.empty[cursor_.index], cursor_.parity ^ 1, watch_);
      TransactionBarrier& full = shared_.full[cursor_.index];
      if (step == 0) {
        full.arrive();  // every thread for the home row it has written
      }
      if (warp_ == 0 && cute::elect_one_sync()) {
        if (step == 0 && is_new) {
          shared_.items[item_index_] = item;  // for those who multiply, with its first stage
        }
        full.arrive_and_expect_tx(bytes);
        if (step > 0) {
          arrive_many(barrier_word(full), kFillArrivals - 1);
        }
      }
      copy(panel, step);
      copy(rows, step);
      cursor_.advance();
    }
  }

  // A panel of weights a warp. Blocks that need the same ones load a share each for all.
  __device__ TensorCopy panel_copy(const BlockWork& work) const {
    const bool multicast = kCluster > 1 && work.shares_weights;
    constexpr int kShare = kPanels / kCluster;
    const int panel = multicast ? block_ * kShare + warp_ : warp_;
    if (multicast && warp_ >= kShare) {
      return {};
    }
    TensorCopy copy;
    copy.destination = shared_.b[0][panel];
    copy.stage_elements = kPanels * kBlockDepth * kPanelColumns;
    copy.row_step = kBlockDepth;
    copy.multicast = multicast;
    if (work.product == Product::kGateUp) {
      copy.map = panel % 2 ? &params_.up : &params_.gate;
      copy.column = work.column_block * (kBlockColumns / 2) + panel / 2 * kPanelColumns;
      copy.row = work.expert * params_.hidden;
    } else {
      copy.map = &params_.down;
      copy.column = work.column_block * kBlockColumns + panel * kPanelColumns;
      copy.row = work.expert * params_.inner;
    }
    return copy;
  }

  // A tile of hidden rows a warp, once they are there.
  __device__ TensorCopy hidden_copy(const BlockWork& work) {
    const int tile = kLoadWarps - 1 - warp_;  // the last warps have no panel if they are shared
    if (tile >= work.tiles) {
      return {};
    }
    wait_for_count(params_.hidden_ready + work.tile + tile,
                   params_.gate_up_columns * kConsumerWarps, watch_);
    fence_proxies_global();
    TensorCopy copy;
    copy.map = &params_.hidden_tiles;
    copy.column = 0;
    copy.column_step = kBlockDepth;
    copy.row = (work.tile + tile) % params_.ring_tiles * kTileRows;
    copy.destination = shared_.a[0] + tile * kTileRows * kBlockDepth;
    copy.stage_elements = kBlockRows * kBlockDepth;
    return copy;
  }

  __device__ void copy(const TensorCopy& copy, int step) {
    if (copy.map != nullptr && cute::elect_one_sync()) {
      uint64_t* const full = barrier_word(shared_.full[cursor_.index]);
      Element* const destination = copy.destination + cursor_.index * copy.stage_elements;
      const int column = copy.column + step * copy.column_step;
      const int row = copy.row + step * copy.row_step;
      if (kCluster > 1 && copy.multicast) {
        constexpr uint16_t kAllBlocks = (1 << kCluster) - 1;
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(copy.map, full, kAllBlocks, kCacheNormally,
                                               destination, column, row);
      } else {
        cute::SM90_TMA_LOAD_2D::copy(copy.map, full, kCacheNormally, destination, column, row);
      }
    }
  }

  // Reads which slots belong to the rows of the next item, early enough for nobody to wait: rows
  // that this thread gathers, or the one row whose home it finds.
  __device__ void look_up_rows(const WorkItem& item) {
    const BlockWork work = block_work(item, kCluster, block_, 0);
    const int32_t* const sources = params_.row_source + work.tile * kTileRows;
    if (work.product == Product::kDown) {
      slots_[0] = thread_ < work.tiles * kTileRows ? sources[thread_] : kPadding;
      return;
    }
#pragma unroll
    for (int i = 0; i < kGathers; ++i) {
      const int row = thread_ / kLanesPerRow + i * kRowsAtOnce;
      slots_[i] = row < work.tiles * kTileRows ? sources[row] : kPadding;
    }
  }

  // Where the output of row `thread_` goes; null for padding.
  __device__ Element* find_home() const {
    const int slot = slots_[0];
    if (slot < 0) {
      return nullptr;
    }
    const int rank = slot / params_.choices;
    const int64_t choice = slot - rank * params_.choices;
    return constant_address<Element>(params_.slots, rank) + choice * params_.hidden;
  }

  // Where this thread's share of each row begins; somewhere harmless for padding.
  __device__ void find_rows() {
    present_ = 0;
#pragma unroll
    for (int i = 0; i < kGathers; ++i) {
      const bool present = slots_[i] >= 0;
      const int slot = present ? slots_[i] : 0;
      const int rank = slot / params_.choices;
      const int64_t token = (slot - rank * params_.choices) / params_.top_k;
      rows_[i] = constant_address<const Element>(params_.x, rank) + token * params_.hidden +
                 thread_ % kLanesPerRow * 8;
      present_ |= static_cast<uint32_t>(present) << i;
    }
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
                      present_ >> i & 1);
      }
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(barrier_word(shared_.full[cursor_.index]));
  }

  // The hidden rows that lay in this tile's place of the ring have been read.
  __device__ void wait_for_ring(const BlockWork& work) {
    for (int tile = work.tile; tile < work.tile + work.tiles; ++tile) {
      if (tile >= params_.ring_tiles) {
        wait_for_count(params_.down_done + tile - params_.ring_tiles, params_.down_columns, watch_);
        fence_proxies_global();
      }
    }
  }

  // An entry of a table that is constant and read often: through the L1 cache.
  template <typename Target, typename Table>
  __device__ static Target* constant_address(Table table, int index) {
    return reinterpret_cast<Target*>(
        __ldg(reinterpret_cast<const unsigned long long*>(table) + index));
  }

  __device__ static uint64_t* barrier_word(TransactionBarrier& barrier) {
    return reinterpret_cast<uint64_t*>(&barrier);
  }

  const ForwardParams& params_;
  SharedStorage& shared_;
  const int block_;
  const int thread_;
  const int warp_;
  StageCursor cursor_;
  HomeCursor home_cursor_;
  Watch watch_;
  int item_index_ = 0;
  int32_t slots_[kGathers];        // of the next item
  const Element* rows_[kGathers];  // of this item
  uint32_t present_ = 0;           // bit i: rows_[i] is no padding
};

}  // namespace mok::sm90
