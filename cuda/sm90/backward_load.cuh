#pragma once

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
        load_gate_up(work);
        break;
      case BackwardProduct::kHidden:
        for (int step = 0; step < params_.hidden / kBlockDepth; ++step) {
          if (!begin_stage(kPanels * kPanelBytes, true)) {
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
        load_pre_activations(work, wave_of(item));
        break;
      case BackwardProduct::kInput:
        for (int step = 0; step < 2 * blocks_; ++step) {
          const int is_up = step < blocks_ ? 0 : 1;
          const int block = step - is_up * blocks_;
          if (!begin_stage(kPanels * kPanelBytes + work.tiles * kTileBytes, false)) {
            return;
          }
          copy_panels(work, [&](int panel) {
            return Box{is_up ? &params_.input_up : &params_.input_gate, block * kBlockDepth,
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

  // What the epilogue of d_hidden needs: a stage has 64 columns of pre-activations for each
  // warpgroup, in the place of half of B. Both blocks of a cluster fill as many stages, some with
  // nothing: a stage is free only when both have left it.
  __device__ void load_pre_activations(const BlockWork& work, int wave) {
    constexpr int kBlockElements = 2 * kTileRows * kPanelColumns;
    const bool two_tiles = work.tiles == kBlockTiles;
    const bool is_replayed = params_.waves[wave].replays != 0;
    const Bits16* const stored = is_replayed ? params_.gradient_ring : params_.saved;
    const auto block_of = [&](int half, int stage) {
      return work.column_block * kPanels + stage + (two_tiles ? 0 : half * (kPanels / 2));
    };
    for (int stage = 0; stage < (two_tiles ? kPanels : kPanels / 2); ++stage) {
      const int copies = (block_of(0, stage) < blocks_) + (block_of(1, stage) < blocks_);
      if (!begin_stage(copies * 2 * kTileBytes, false)) {
        return;
      }
      // One loading warp for each multiplying warpgroup.
      const int block = block_of(warp_, stage);
      if (block < blocks_ && cute::elect_one_sync()) {
        const int tile = work.tile + (two_tiles ? warp_ : 0);
        const int64_t place = is_replayed ? ring_tile(tile) : tile;
        cute::SM90_BULK_COPY_G2S::copy(stored + (place * blocks_ + block) * kBlockElements,
                                       full_word(), shared_.b[cursor_.index][warp_ * 2],
                                       2 * kTileBytes);
      }
      cursor_.advance();
    }
  }

  // The rows of an expert, a tile a step.
  __device__ void load_weights(BackwardProduct product, const WorkItem& item, const BlockWork& work,
                               int begin_tile, int end_tile) {
    const bool is_down = product == BackwardProduct::kDownWeights;
    const Bits16* const* const tokens = is_down ? params_.dy_rows : params_.x_rows;
    const int first_column = (item.first_tile * kCluster + block_) * kBlockRows;
    const CUtensorMap* const map = is_down ? &params_.hidden_blocks : &params_.gradient_blocks;
    const int tile_blocks = is_down ? blocks_ : 2 * blocks_;
    int ring = ring_tile(begin_tile);
    look_up_tokens(tokens, begin_tile, end_tile);
    for (int tile = begin_tile; tile < end_tile; ++tile) {
      find_columns(first_column);
      look_up_tokens(tokens, tile + 1, end_tile);
      if (!begin_stage(kPanels * kPanelBytes, true)) {
        return;
      }
      copy_panels(work, [&](int panel) {
        const int block = ring * tile_blocks + work.column_block * kPanels + panel;
        return Box{map, 0, block * kTileRows};
      });
      gather_columns(first_column);
      cursor_.advance();
      ring = ring + 1 == params_.shape.work.ring_tiles ? 0 : ring + 1;
    }
  }

  __device__ int ring_tile(int tile) const { return tile % params_.shape.work.ring_tiles; }
  __device__ int gradient_row(int tile, int block, int is_up) const {
    return ((ring_tile(tile) * blocks_ + block) * 2 + is_up) * kTileRows;
  }

  // Reads where the tokens of a tile's rows lie, a step before they are needed.
  __device__ void look_up_tokens(const Bits16* const* tokens, int tile, int end) {
    if (tile < end) {
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        tokens_[i] = tokens[tile * kTileRows + thread_ / kLanesPerRow + i * kRowsAtOnce];
      }
    }
  }

  __device__ void find_columns(int first_column) {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      rows_[i] =
          reinterpret_cast<const Element*>(tokens_[i]) + first_column + thread_ % kLanesPerRow * 8;
    }
  }

  // A with the contraction over rows: 128 columns of 64 rows, in two panels.
  __device__ void gather_columns(int first_column) {
#pragma unroll
    for (int i = 0; i < kGathers; ++i) {
      const int panel = i / kRowsOfThread;
      copy_async_16(destination_of(i), rows_[i % kRowsOfThread] + panel * kPanelColumns,
                    first_column + panel * kPanelColumns < params_.hidden);
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(full_word());
  }

  static constexpr int kRowsOfThread = kTileRows / kRowsAtOnce;

  const int blocks_;  // of 64 columns of I
  const Bits16* tokens_[kRowsOfThread];
};

}  // namespace mok::sm90
