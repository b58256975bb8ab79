#pragma once

#include <cutlass/cutlass.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/plan.h"
#include "sm90/backward.h"
#include "sm90/load.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"

// The backward kernel's loading warps. What is indexed by tokens, x and dy, is gathered 16 bytes a
// thread; weights and rings come by tensor copies.
namespace mok::sm90 {

template <int kCluster>
class BackwardLoader {
 public:
  __device__ BackwardLoader(const BackwardParams& params, SharedStorage& shared,
                            int block_in_cluster, int warp)
      : params_(params),
        shared_(shared),
        block_(block_in_cluster),
        warp_(warp),
        thread_(warp * kWarp + threadIdx.x % kWarp),
        blocks_(params.inner / kPanelColumns),
        watch_{global_nanoseconds() + params.timeout_ns} {}

  __device__ void run() {
    AssignmentCursor cursor;
    while (true) {
      wait(shared_.assigned[cursor.index], cursor.parity, watch_);
      if (__any_sync(kAllLanes, watch_.late)) {
        *params_.fault = 1;
        return;
      }
      const Assignment& assignment = shared_.assignments[cursor.index];
      const WorkItem item = assignment.item;
      if (item.flags & WorkItem::kStopFlag) {
        return;
      }
      const Range tiles{assignment.begin_tile, assignment.end_tile};
      read_rows(assignment.rows);
      arrive_in_cluster<kCluster>(shared_.taken[cursor.index]);
      fence_proxies_global();  // what the rings hold has been waited for, by another thread
      load(item, tiles);
      cursor.advance();
    }
  }

 private:
  struct Range {
    int begin;
    int end;
  };
  struct Box {
    const CUtensorMap* map;
    int column;
    int row;
  };

  __device__ void load(const WorkItem& item, const Range& tiles) {
    const BackwardProduct product = product_of(item);
    const BlockWork work = block_work(item, block_);
    switch (product) {
      case BackwardProduct::kReplay:
        for (int step = 0; step < params_.hidden / kBlockDepth; ++step) {
          if (!begin_stage(kPanels * kPanelBytes, 0)) {
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
        break;
      case BackwardProduct::kHidden:
        for (int step = 0; step < params_.hidden / kBlockDepth; ++step) {
          if (!begin_stage(kPanels * kPanelBytes, 0)) {
            return;
          }
          copy_panels(work, [&](int panel) {
            return Box{&params_.down, step * kBlockDepth,
                       work.expert * params_.inner + work.column_block * kBlockColumns +
                           panel * kPanelColumns};
          });
          gather_rows(work, step);
          cursor_.advance();
        }
        break;
      case BackwardProduct::kInput:
        for (int step = 0; step < 2 * blocks_; ++step) {
          const int is_up = step < blocks_ ? 0 : 1;
          const int block = step - is_up * blocks_;
          if (!begin_stage(kPanels * kPanelBytes + work.tiles * kTileBytes, kFillArrivals - 1)) {
            return;
          }
          copy_panels(work, [&](int panel) {
            return Box{is_up ? &params_.up : &params_.gate, block * kBlockDepth,
                       work.expert * params_.hidden + work.column_block * kBlockColumns +
                           panel * kPanelColumns};
          });
          if (warp_ < work.tiles && cute::elect_one_sync()) {
            cute::SM90_TMA_LOAD_2D::copy(&params_.gradient_blocks, full_word(), kCacheNormally,
                                         shared_.a[cursor_.index] + warp_ * kTileRows * kBlockDepth,
                                         0, gradient_row(work.tile + warp_, block, is_up));
          }
          cursor_.advance();
        }
        break;
      default:
        load_weights(product, item, work, tiles);
    }
  }

  // The rows of an expert, a tile a step.
  __device__ void load_weights(BackwardProduct product, const WorkItem& item, const BlockWork& work,
                               const Range& tiles) {
    const bool is_down = product == BackwardProduct::kDownWeights;
    const Bits16* const own = is_down ? params_.dy : params_.x;
    const Bits16* const received = is_down ? params_.received_dy : params_.received_x;
    const int first_column = (item.first_tile * kCluster + block_) * kBlockRows;
    look_up_sources(tiles.begin, tiles.end);
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      find_sources(own, received, first_column);
      look_up_sources(tile + 1, tiles.end);
      if (!begin_stage(kPanels * kPanelBytes, 0)) {
        return;
      }
      copy_panels(work, [&](int panel) {
        if (is_down) {
          return Box{&params_.hidden_blocks, 0,
                     hidden_row(tile, work.column_block * kPanels + panel)};
        }
        return Box{&params_.gradient_blocks, 0,
                   gradient_row(tile, work.column_block * (kPanels / 2) + panel / 2, panel % 2)};
      });
      gather_columns(first_column);
      cursor_.advance();
    }
  }

  __device__ int ring_tile(int tile) const { return tile % params_.shape.work.ring_tiles; }
  __device__ int gradient_row(int tile, int block, int is_up) const {
    return ((ring_tile(tile) * blocks_ + block) * 2 + is_up) * kTileRows;
  }
  __device__ int hidden_row(int tile, int block) const {
    return (ring_tile(tile) * blocks_ + block) * kTileRows;
  }

  // As in load.cuh: false after a fault.
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

  // This warp's panels of B, where `box(panel)` says. Blocks that need the same ones copy a share
  // each for all.
  template <typename FindBox>
  __device__ void copy_panels(const BlockWork& work, const FindBox& box) {
    if (!cute::elect_one_sync()) {
      return;
    }
    const bool multicast = kCluster > 1 && work.shares_weights;
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

  // Where this thread's share of each row begins; null for padding.
  __device__ void read_rows(Element* const* rows) {
#pragma unroll
    for (int i = 0; i < kGathers; ++i) {
      const Element* const row = rows[thread_ / kLanesPerRow + i * kRowsAtOnce];
      rows_[i] = row == nullptr ? nullptr : row + thread_ % kLanesPerRow * 8;
    }
    __syncwarp();
  }

  // A with the contraction along the rows: 64 columns of every row of the block.
  __device__ void gather_rows(const BlockWork& work, int step) {
    const bool two_tiles = work.tiles == kBlockTiles;
#pragma unroll
    for (int i = 0; i < kGathers; ++i) {
      if (i < kGathers / kBlockTiles || two_tiles) {
        copy_async_16(destination_of(i), rows_[i] + step * kBlockDepth, rows_[i] != nullptr);
      }
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(full_word());
  }

  // A with the contraction over rows: 128 columns of 64 rows, in two panels.
  __device__ void gather_columns(int first_column) {
#pragma unroll
    for (int i = 0; i < kGathers; ++i) {
      const int panel = i / kRowsOfThread;
      const Element* const source = rows_[i % kRowsOfThread];
      const bool is_there =
          source != nullptr && first_column + panel * kPanelColumns < params_.hidden;
      copy_async_16(destination_of(i), source + panel * kPanelColumns, is_there);
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(full_word());
  }

  // The 16 bytes of a stage's A, in the 128-byte swizzle, that this thread copies as its i-th.
  __device__ Element* destination_of(int i) const {
    const int row = thread_ / kLanesPerRow;
    const int eighth = (thread_ ^ row) % kLanesPerRow;
    return shared_.a[cursor_.index] + (row + i * kRowsAtOnce) * kBlockDepth + eighth * 8;
  }

  // Reads which slots belong to the rows of a tile, a step before they are needed.
  __device__ void look_up_sources(int tile, int end) {
    if (tile < end) {
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        slots_[i] = params_.row_source[tile * kTileRows + thread_ / kLanesPerRow + i * kRowsAtOnce];
      }
    }
  }

  __device__ void find_sources(const Bits16* own, const Bits16* received, int first_column) {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int32_t token = slots_[i] / params_.top_k;
      const int32_t in_rank = token - params_.rank * params_.tokens;
      const bool is_own = in_rank >= 0 && in_rank < params_.tokens;
      const Bits16* const row =
          (is_own ? own : received) + int64_t{is_own ? in_rank : token} * params_.hidden;
      rows_[i] = slots_[i] < 0 ? nullptr
                               : reinterpret_cast<const Element*>(row) + first_column +
                                     thread_ % kLanesPerRow * 8;
    }
  }

  __device__ uint64_t* full_word() const {
    return reinterpret_cast<uint64_t*>(&shared_.full[cursor_.index]);
  }

  static constexpr int kRowsOfThread = kTileRows / kRowsAtOnce;

  const BackwardParams& params_;
  SharedStorage& shared_;
  const int block_;
  const int warp_;
  const int thread_;
  const int blocks_;  // of 64 columns of I
  StageCursor cursor_;
  Watch watch_;
  const Element* rows_[kGathers];
  int32_t slots_[kRowsOfThread];
};

}  // namespace mok::sm90
