#pragma once

#include "core/plan.h"
#include "sm90/backward.h"
#include "sm90/load.cuh"

// What the backward kernel's stages are filled with.
namespace mok::sm90 {

class BackwardLoader : LoaderBase<BackwardParams> {
 public:
  __device__ BackwardLoader(const BackwardParams& params, SharedStorage& shared,
                            int block_in_cluster, int warp)
      : LoaderBase(params, shared, block_in_cluster, warp), blocks_(params.inner / kPanelColumns) {}

  __device__ void run() {
    load_items([&](const WorkItem& item, int begin_tile, int end_tile) {
      load(item, begin_tile, end_tile);
    });
  }

 private:
  __device__ void load(const WorkItem& item, int begin_tile, int end_tile) {
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
          copy_tile(work,
                    {&params_.gradient_blocks, 0, gradient_row(work.tile + warp_, block, is_up)});
          cursor_.advance();
        }
        break;
      default:
        load_weights(product, item, work, begin_tile, end_tile);
    }
  }

  // The rows of an expert, a tile a step.
  __device__ void load_weights(BackwardProduct product, const WorkItem& item, const BlockWork& work,
                               int begin_tile, int end_tile) {
    const bool is_down = product == BackwardProduct::kDownWeights;
    const Bits16* const own = is_down ? params_.dy : params_.x;
    const Bits16* const received = is_down ? params_.received_dy : params_.received_x;
    const int first_column = (item.first_tile * kCluster + block_) * kBlockRows;
    look_up_sources(begin_tile, end_tile);
    for (int tile = begin_tile; tile < end_tile; ++tile) {
      find_sources(own, received, first_column);
      look_up_sources(tile + 1, end_tile);
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

  static constexpr int kRowsOfThread = kTileRows / kRowsAtOnce;

  const int blocks_;  // of 64 columns of I
  int32_t slots_[kRowsOfThread];
};

}  // namespace mok::sm90
