#pragma once

#include "sm90/forward.h"
#include "sm90/multiplier.cuh"
#include "sm90/mx_epilogue.cuh"

// What the forward kernel does with its products: SwiGLU and the ring of hidden rows, or the places
// of output rows.
namespace mok::sm90 {

template <typename Params>
class ForwardMultiplier : public MultiplierBase<ForwardMultiplier<Params>, Params> {
  using Base = MultiplierBase<ForwardMultiplier<Params>, Params>;
  using Base::announce;
  using Base::announce_later;
  using Base::block_;
  using Base::half_;
  using Base::lane_;
  using Base::params_;
  using Base::perform_items;
  using Base::push;
  using Base::read_homes;
  using Base::staging;
  using Base::tile_of;
  using Base::warp_;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() { perform_items(); }

  __device__ __forceinline__ void perform(const Assignment& assignment, const Barrier& taken,
                                          float (&accumulators)[kAccumulators]) {
    const BlockWork work = block_work(assignment.item, block_);
    const bool is_down = work.product == Product::kDown;
    if (!is_down) {
      __syncwarp();
      arrive_in_cluster(taken);
    }
    const int depth = is_down ? params_.inner : params_.hidden;
    this->template multiply_tiles<Major::MN>(work, depth / kBlockDepth, accumulators);
    if (!is_down) {
      if (params_.clamp.is_finite()) {
        store_gate_up<true>(work, accumulators);
      } else {
        store_gate_up<false>(work, accumulators);
      }
      return;
    }
    Element* rows[kStores];
    read_homes(work, assignment, rows);
    arrive_in_cluster(taken);
    if (work.column_block < params_.down_columns) {
      release_ring(work);
      push(work, rows, accumulators);
    }
  }

 private:
  template <bool kClamps>
  __device__ __forceinline__ void store_gate_up(const BlockWork& work,
                                                float (&accumulators)[kAccumulators]) {
    if (work.column_block >= params_.gate_up_columns) {
      return;
    }
    const bool two_tiles = work.tiles == kBlockTiles;
    const int tile = tile_of(work);
    const int ring_row = tile % params_.ring_tiles * kTileRows + warp_ * kWarpRows;
    const int column =
        work.column_block * (kBlockColumns / 2) + (two_tiles ? 0 : half_ * kPanelColumns);
    announce();  // if there was no occasion
    if constexpr (kClamps) {
      keep_sides_of_clamp(accumulators, params_.clamp);
    }
#pragma unroll
    for (int panel = 0; panel < kPanels / 2; ++panel) {
      if (panel == 0 || two_tiles) {
        const float* const gates = accumulators + panel * 2 * kPanelAccumulators;
        const float* const ups = gates + kPanelAccumulators;
        const int panel_column = column + panel * kPanelColumns;
        Element* const buffer = staging(panel);
        if constexpr (Params::kIsMx) {
          stage_rounded<kClamps>(buffer, gates, ups);
        } else {
#pragma unroll
          for (int group = 0; group < kPanelGroups; ++group) {
            stage_group(buffer, group, [&](int i) {
              return swiglu_pair<kClamps>(pack_pair(gates, group, i), pack_pair(ups, group, i),
                                          params_.clamp.limit);
            });
          }
        }
        store_hidden(buffer, panel_column, ring_row);
        if (tile < params_.saved_tiles && panel_column < params_.inner) {
          save_panel(gates, ups, tile, panel_column);
        }
      }
    }
    // Four warps write a tile of two panels, or eight warps a panel each: equal weight in sum.
    announce_later(params_.hidden_ready + tile, two_tiles ? 2 : 1);
  }

  // Stages a panel of hidden rows in MXFP8, which are rounded from float.
  template <bool kClamps>
  __device__ __forceinline__ void stage_rounded(Element* buffer, const float* gates,
                                                const float* ups) const {
    float hidden[kPanelBlocks * kHalves][kBlockValues];
    const auto for_each_word = [&](const auto& visit) {
#pragma unroll
      for (int i = 0; i < kPanelBlocks * kHalves; ++i) {
#pragma unroll
        for (int value = 0; value < kBlockValues; value += 2) {
          visit(word_of_panel(i / kHalves, block_word(i % kHalves, value)), hidden[i] + value);
        }
      }
    };
    for_each_word([&](int word, float* values) {
      const uint32_t gate = pack_pair(gates, 0, word), up = pack_pair(ups, 0, word);
      const float limit = params_.clamp.limit;
      values[0] = swiglu<kClamps>(low_bf16(gate), low_bf16(up), limit);
      values[1] = swiglu<kClamps>(high_bf16(gate), high_bf16(up), limit);
    });
    round_in_quads(hidden);
    uint32_t words[kPanelGroups * kGroupWords];
    for_each_word(
        [&](int word, const float* values) { words[word] = pack_bf16(values[0], values[1]); });
#pragma unroll
    for (int group = 0; group < kPanelGroups; ++group) {
      stage_group(buffer, group, [&](int i) { return words[group * kGroupWords + i]; });
    }
  }

  // Sends a staged panel of hidden rows to the ring. All lanes call it.
  __device__ void store_hidden(const Element* buffer, int column, int ring_row) const {
    cute::tma_store_fence();
    __syncwarp();
    if (lane_ == 0) {
      cute::SM90_TMA_STORE_2D::copy(&params_.hidden_warps, buffer, column, ring_row);
      cute::tma_store_arrive();
    }
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

  // This block has read the tile's hidden rows for one column block.
  __device__ void release_ring(const BlockWork& work) {
    if (half_ == 0 && warp_ == 0 && lane_ < work.tiles &&
        work.tile + lane_ + params_.ring_tiles < *params_.tile_count) {
      add_release(params_.down_done + work.tile + lane_, 1);
    }
  }
};

}  // namespace mok::sm90
