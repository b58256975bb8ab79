#pragma once

#include "device/inject.cuh"
#include "sm90/backward.h"
#include "sm90/backward_epilogue.cuh"
#include "sm90/multiplier.cuh"
#include "sm90/mx_epilogue.cuh"
#include "sm90/partial_sums.cuh"
#include "sm90/weight_gradients.cuh"

// What the backward kernel does with its products: gradients and weighted hidden rows for the
// rings, the rows of the input's gradient, the weights' gradients.
namespace mok::sm90 {

template <typename Params>
class BackwardMultiplier : public MultiplierBase<BackwardMultiplier<Params>, Params> {
  using Base = MultiplierBase<BackwardMultiplier<Params>, Params>;
  using Base::announce;
  using Base::announce_later;
  using Base::await;
  using Base::block_;
  using Base::cursor_;
  using Base::half_;
  using Base::lane_;
  using Base::params_;
  using Base::perform_items;
  using Base::push;
  using Base::read_homes;
  using Base::record_products;
  using Base::shared_;
  using Base::staging;
  using Base::tile_of;
  using Base::warp_;
  using Base::watch_;

 public:
  __device__ BackwardMultiplier(const Params& params, SharedStorage& shared, int block_in_cluster,
                                int half)
      : Base(params, shared, block_in_cluster, half), blocks_(params.inner / kPanelColumns) {}

  __device__ __forceinline__ void run() { perform_items(); }

  __device__ __forceinline__ void perform(const Assignment& assignment, const Barrier& taken,
                                          float (&accumulators)[kAccumulators]) {
    const WorkItem item = assignment.item;
    const BackwardProduct product = product_of(item);
    const BlockWork work = block_work(item, block_);
    const int begin_tile = assignment.begin_tile;
    const int end_tile = assignment.end_tile;
    if (product != BackwardProduct::kInput) {
      __syncwarp();
      arrive_in_cluster(taken);
    }
    switch (product) {
      case BackwardProduct::kReplay:
        this->template multiply_tiles<Major::MN>(work, params_.hidden / kBlockDepth, accumulators);
        keep_replayed(work, accumulators);
        break;
      case BackwardProduct::kHidden:
        this->template multiply_tiles<Major::K>(work, params_.hidden / kBlockDepth, accumulators);
        if (params_.clamp.is_finite()) {
          store_hidden_gradients<true>(work, accumulators);
        } else {
          store_hidden_gradients<false>(work, accumulators);
        }
        break;
      case BackwardProduct::kInput: {
        this->template multiply_tiles<Major::K>(work, 2 * blocks_, accumulators);
        Element* rows[kStores];
        read_homes(work, assignment, rows);
        arrive_in_cluster(taken);
        if (work.column_block < params_.shape.input_columns) {
          push(work, rows, accumulators);
        }
        if (work.column_block == 0 && (work.tiles == kBlockTiles || half_ == 0)) {
          push_weight_gradients(tile_of(work));
        }
        count_wave_item(wave_of(item));
        break;
      }
      default:
        multiply_weights(product, item, begin_tile, end_tile, accumulators);
        count_wave_item(wave_of(item));
    }
  }

 private:
  struct RowWeights {
    float upper;  // router weights of row lane / 4 of the warp's 16,
    float lower;  // and of the row eight below
  };

  __device__ int ring_tile(int tile) const { return tile % params_.shape.work.ring_tiles; }

  __device__ RowWeights weights_of(const BlockWork& work) const {
    const int row = tile_of(work) * kTileRows + warp_ * kWarpRows + lane_ / 4;
    const auto weight_of = [&](int32_t slot) { return slot < 0 ? 0.0f : params_.weights[slot]; };
    return {weight_of(params_.row_source[row]), weight_of(params_.row_source[row + 8])};
  }

  __device__ __forceinline__ void keep_replayed(const BlockWork& work,
                                                float (&accumulators)[kAccumulators]) {
    if (work.column_block >= params_.shape.replay_columns) {
      return;
    }
    const bool two_tiles = work.tiles == kBlockTiles;
    const int tile = tile_of(work);
    const int first_block = work.column_block * 2 + (two_tiles ? 0 : half_);
    announce();
    if (params_.clamp.is_finite()) {
      keep_sides_of_clamp(accumulators, params_.clamp);
    }
#pragma unroll
    for (int panel = 0; panel < kPanels / 2; ++panel) {
      if ((panel == 0 || two_tiles) && first_block + panel < blocks_) {
        const float* const gates = accumulators + panel * 2 * kPanelAccumulators;
        const float* const ups = gates + kPanelAccumulators;
        // Of 64 columns [gate, up][64][64] elements, each in the order of ForwardParams::saved.
        constexpr int kBlockVectors = kTileRows * kPanelColumns / 8;
        const int64_t block = int64_t{ring_tile(tile)} * blocks_ + first_block + panel;
        uint4* const place = reinterpret_cast<uint4*>(params_.gradient_ring) +
                             block * 2 * kBlockVectors + warp_ * kPanelGroups * kWarp + lane_;
#pragma unroll
        for (int group = 0; group < kPanelGroups; ++group) {
          place[group * kWarp] = pack_group(gates, group);
          place[kBlockVectors + group * kWarp] = pack_group(ups, group);
        }
      }
    }
    announce_later(params_.replayed + tile, two_tiles ? 2 : 1);
  }

  // After the products the stages bring the pre-activations, 64 columns each, which the gradients
  // then replace; the weighted hidden rows take the place of the rows of A.
  template <bool kClamps>
  __device__ __forceinline__ void store_hidden_gradients(
      const BlockWork& work, const float (&accumulators)[kAccumulators]) {
    const bool two_tiles = work.tiles == kBlockTiles;
    const int tile = tile_of(work);
    const int first_block = work.column_block * kPanels + (two_tiles ? 0 : half_ * (kPanels / 2));
    announce();
    const RowWeights weights = weights_of(work);
    RowWeights dots{0.0f, 0.0f};
    int previous = cursor_.index;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      if (panel < kPanels / 2 || two_tiles) {
        const int block = first_block + panel;
        wait(shared_.full[cursor_.index], cursor_.parity, watch_);
        if (block < blocks_) {
          const float* const values = accumulators + panel * kPanelAccumulators;
          if constexpr (Params::kIsMx) {
            store_rounded_panel<kClamps>(tile, block, weights, values, dots);
          } else {
            store_panel<kClamps>(tile, block, weights, values, dots);
          }
        }
        if (panel % 2 == 1) {
          if (block - 1 < blocks_) {
            keep_dots(tile, block / 2, dots);
          }
          dots = {0.0f, 0.0f};
        }
        if (lane_ == 0) {
          cute::tma_store_arrive();
          cute::tma_store_wait<1>();  // the stage before has been read
        }
        __syncwarp();
        if (panel > 0) {
          release_stage(shared_.empty[previous], watch_);
        }
        previous = cursor_.index;
        cursor_.advance();
      }
    }
    if (lane_ == 0) {
      cute::tma_store_wait<0>();
    }
    __syncwarp();
    release_stage(shared_.empty[previous], watch_);
    if (work.column_block < params_.shape.hidden_columns) {
      announce_later(params_.hidden_ready + tile, two_tiles ? 2 : 1);
    }
  }

  // 64 columns of I of a tile: what the warp's lanes read of their stage they overwrite.
  template <bool kClamps>
  __device__ __forceinline__ void store_panel(int tile, int block, const RowWeights& weights,
                                              const float* d_hidden, RowWeights& dots) {
    constexpr int kWarpElements = kWarpRows * kPanelColumns;
    Element* const d_gates = shared_.b[cursor_.index][half_ * 2] + warp_ * kWarpElements;
    Element* const d_ups = shared_.b[cursor_.index][half_ * 2 + 1] + warp_ * kWarpElements;
    Element* const hidden =
        shared_.a[cursor_.index] + (half_ * kWarpgroupWarps + warp_) * kWarpElements;
    uint4 gates[kPanelGroups], ups[kPanelGroups];
#pragma unroll
    for (int group = 0; group < kPanelGroups; ++group) {
      gates[group] = reinterpret_cast<const uint4*>(d_gates)[group * kWarp + lane_];
      ups[group] = reinterpret_cast<const uint4*>(d_ups)[group * kWarp + lane_];
    }
    __syncwarp();
#pragma unroll
    for (int group = 0; group < kPanelGroups; ++group) {
      uint32_t d_gate[kGroupWords], d_up[kGroupWords], weighted[kGroupWords];
#pragma unroll
      for (int i = 0; i < kGroupWords; ++i) {
        const float* const values = d_hidden + (group * kGroupWords + i) * 2;
        const uint32_t gate = word_of(gates[group], i), up = word_of(ups[group], i);
        const float weight = i % 2 == 0 ? weights.upper : weights.lower;
        float& dot = i % 2 == 0 ? dots.upper : dots.lower;
        const SwigluGradient first = swiglu_gradient<kClamps>(
            low_bf16(gate), low_bf16(up), __fmul_rn(weight, values[0]), params_.clamp.limit);
        const SwigluGradient second = swiglu_gradient<kClamps>(
            high_bf16(gate), high_bf16(up), __fmul_rn(weight, values[1]), params_.clamp.limit);
        dot = __fadd_rn(dot, __fmul_rn(first.hidden, values[0]));
        dot = __fadd_rn(dot, __fmul_rn(second.hidden, values[1]));
        d_gate[i] = pack_bf16(first.d_gate, second.d_gate);
        d_up[i] = pack_bf16(first.d_up, second.d_up);
        weighted[i] = pack_bf16(__fmul_rn(weight, first.hidden), __fmul_rn(weight, second.hidden));
      }
      stage_group(d_gates, group, [&](int i) { return d_gate[i]; });
      stage_group(d_ups, group, [&](int i) { return d_up[i]; });
      stage_group(hidden, group, [&](int i) { return weighted[i]; });
    }
    send_panel(tile, block, d_gates, d_ups, hidden);
  }

  // The same in MXFP8. Gradients are staged apart, so that no more pre-activations than those of a
  // block of 32 columns are under way at a time: registers are short.
  template <bool kClamps>
  __device__ __forceinline__ void store_rounded_panel(int tile, int block,
                                                      const RowWeights& weights,
                                                      const float* d_hidden, RowWeights& dots) {
    constexpr int kWarpElements = kWarpRows * kPanelColumns;
    const Element* const gates = shared_.b[cursor_.index][half_ * 2] + warp_ * kWarpElements;
    const Element* const ups = shared_.b[cursor_.index][half_ * 2 + 1] + warp_ * kWarpElements;
    Element* const hidden =
        shared_.a[cursor_.index] + (half_ * kWarpgroupWarps + warp_) * kWarpElements;
#pragma unroll
    for (int i = 0; i < kPanelBlocks; ++i) {
      stage_rounded<kClamps>(i, gates, ups, hidden, weights, d_hidden, dots);
    }
    send_panel(tile, block, staging(0), staging(1), hidden);
  }

  template <bool kClamps>
  __device__ __forceinline__ void stage_rounded(int block, const Element* stored_gates,
                                                const Element* stored_ups, Element* hidden_rows,
                                                const RowWeights& weights, const float* d_hidden,
                                                RowWeights& dots) {
    uint4 gates[kBlockGroups], ups[kBlockGroups];
#pragma unroll
    for (int i = 0; i < kBlockGroups; ++i) {
      const int place = (block * kBlockGroups + i) * kWarp + lane_;
      gates[i] = reinterpret_cast<const uint4*>(stored_gates)[place];
      ups[i] = reinterpret_cast<const uint4*>(stored_ups)[place];
    }
    uint32_t d_gate[kBlockGroups][kGroupWords], d_up[kBlockGroups][kGroupWords];
    uint32_t weighted[kBlockGroups][kGroupWords];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const float weight = half == 0 ? weights.upper : weights.lower;
      float& dot = half == 0 ? dots.upper : dots.lower;
      float rounded[3][kBlockValues];
      auto& [d_gates, d_ups, hidden] = rounded;
#pragma unroll
      for (int value = 0; value < kBlockValues; value += 2) {
        const BlockWord word = block_word(half, value);
        const float* const values = d_hidden + word_of_panel(block, word) * 2;
        const uint32_t gate = word_of(gates[word.group], word.index);
        const uint32_t up = word_of(ups[word.group], word.index);
        const SwigluGradient first = swiglu_gradient<kClamps>(
            low_bf16(gate), low_bf16(up), __fmul_rn(weight, values[0]), params_.clamp.limit);
        const SwigluGradient second = swiglu_gradient<kClamps>(
            high_bf16(gate), high_bf16(up), __fmul_rn(weight, values[1]), params_.clamp.limit);
        hidden[value] = first.hidden;
        hidden[value + 1] = second.hidden;
        d_gates[value] = first.d_gate;
        d_gates[value + 1] = second.d_gate;
        d_ups[value] = first.d_up;
        d_ups[value + 1] = second.d_up;
      }
      round_in_quads(rounded);
#pragma unroll
      for (int value = 0; value < kBlockValues; value += 2) {
        const BlockWord word = block_word(half, value);
        const float* const values = d_hidden + word_of_panel(block, word) * 2;
        dot = __fadd_rn(dot, __fmul_rn(hidden[value], values[0]));
        dot = __fadd_rn(dot, __fmul_rn(hidden[value + 1], values[1]));
        d_gate[word.group][word.index] = pack_bf16(d_gates[value], d_gates[value + 1]);
        d_up[word.group][word.index] = pack_bf16(d_ups[value], d_ups[value + 1]);
        weighted[word.group][word.index] =
            pack_bf16(__fmul_rn(weight, hidden[value]), __fmul_rn(weight, hidden[value + 1]));
      }
    }
    if (block == 0) {
      if (lane_ == 0) {
        cute::tma_store_wait<0>();  // the panel before has been read
      }
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kBlockGroups; ++i) {
      const int group = block * kBlockGroups + i;
      stage_group(staging(0), group, [&](int word) { return d_gate[i][word]; });
      stage_group(staging(1), group, [&](int word) { return d_up[i][word]; });
      stage_group(hidden_rows, group, [&](int word) { return weighted[i][word]; });
    }
  }

  // Stores to the rings what a warp has staged of its rows.
  __device__ __forceinline__ void send_panel(int tile, int block, const Element* d_gates,
                                             const Element* d_ups, const Element* hidden) const {
    cute::tma_store_fence();
    __syncwarp();
    if (lane_ == 0) {
      const int row = (ring_tile(tile) * blocks_ + block) * kTileRows;
      const int gradient_row = 2 * row + warp_ * kWarpRows;
      const auto store = cute::SM90_TMA_STORE_2D::copy;
      store(&params_.gradient_warps, d_gates, 0, gradient_row);
      store(&params_.gradient_warps, d_ups, 0, gradient_row + kTileRows);
      store(&params_.hidden_warps, hidden, 0, row + warp_ * kWarpRows);
    }
  }

  // Sums over 128 columns of I, always: whichever warps share a tile, the router weights' gradients
  // are sums of the same parts.
  __device__ void keep_dots(int tile, int part, RowWeights dots) {
    dots = {sum_of_quad(dots.upper), sum_of_quad(dots.lower)};
    if (lane_ % 4 == 0) {
      const int row = ring_tile(tile) * kTileRows + warp_ * kWarpRows + lane_ / 4;
      float* const parts = params_.dot_parts + int64_t{row} * params_.shape.replay_columns + part;
      parts[0] = dots.upper;
      parts[int64_t{8} * params_.shape.replay_columns] = dots.lower;
    }
  }

  // The router weights' gradients of a tile's rows, from their parts in ascending order.
  __device__ void push_weight_gradients(int tile) {
    if (lane_ >= kWarpRows) {
      return;
    }
    const int in_tile = warp_ * kWarpRows + lane_;
    const int32_t slot = params_.row_source[tile * kTileRows + in_tile];
    if (slot < 0 || watch_.late) {
      return;
    }
    const bool is_pushed = params_.d_weight_rows == nullptr;
    if (is_pushed && inject::drops(Hook::kPushNumber, slot / params_.choices)) {
      return;
    }
    const int64_t row = ring_tile(tile) * kTileRows + in_tile;
    const float* const parts = params_.dot_parts + row * params_.shape.replay_columns;
    float sum = 0.0f;
    for (int part = 0; part < params_.shape.replay_columns; ++part) {
      sum = __fadd_rn(sum, __ldcg(parts + part));
    }
    *weight_gradient_at(tile * kTileRows + in_tile, slot) = sum;
  }

  __device__ float* weight_gradient_at(int row, int32_t slot) const {
    if (params_.d_weight_rows != nullptr) {
      return params_.d_weight_rows + row;
    }
    const int32_t rank = slot / params_.choices;
    float* const home =
        params_.bases == nullptr
            ? params_.own_d_weight
            : reinterpret_cast<float*>(params_.bases[rank] + params_.d_weight_offset);
    return home + (slot - rank * params_.choices);
  }

  __device__ __forceinline__ void multiply_weights(BackwardProduct product, const WorkItem& item,
                                                   int begin_tile, int end_tile,
                                                   float (&accumulators)[kAccumulators]) {
    const bool is_down = product == BackwardProduct::kDownWeights;
    const bool is_first = begin_tile == params_.expert_tile[item.expert];
    int32_t is_last = end_tile == params_.expert_tile[item.expert + 1] ? 1 : 0;
    if constexpr (Params::kIsMx) {
      asm volatile("" : "+r"(is_last));  // lest ptxas keeps, and spills, what is compared
    }
    const WeightPlace place{is_down, item.expert,
                            (item.first_tile * kCluster + block_) * kBlockRows + half_ * kTileRows,
                            item.column_block * (is_down ? kBlockColumns : kBlockColumns / 2)};
    if (is_first) {
#pragma unroll
      for (float& value : accumulators) {
        value = 0.0f;
      }
    } else {
      read_partial_sums(params_, place, block_of_expert(item, is_down), accumulators);
    }
    if (begin_tile < end_tile) {
      await(shared_.full[cursor_.index], cursor_.parity);
      multiply<kBlockColumns, Major::MN, Major::MN, true>(shared_, cursor_, watch_,
                                                          end_tile - begin_tile, half_, 0,
                                                          accumulators, [&] { announce(); });
    }
    record_products();
    if (is_last == 0) {
      keep_partial_sums(params_, place, block_of_expert(item, is_down), accumulators);
      return;
    }
    char* const buffers = reinterpret_cast<char*>(shared_.staging[half_ * kWarpgroupWarps][0]);
    if (params_.dw_is_f32) {
      store_weights<float>(params_, place, half_, buffers, accumulators);
    } else {
      store_weights<Element>(params_, place, half_, buffers, accumulators);
    }
  }

  // This block's place among those of an expert's items.
  __device__ int64_t block_of_expert(const WorkItem& item, bool is_down) const {
    const int columns = params_.shape.replay_columns + params_.shape.down_columns;
    const int column = item.column_block + (is_down ? params_.shape.replay_columns : 0);
    return (int64_t{item.first_tile} * columns + column) * kCluster + block_;
  }

  // This warp has read of the rings what the item needs, and written its partial sums.
  __device__ void count_wave_item(int wave) {
    __syncwarp();
    if (lane_ == 0) {
      add_release(params_.wave_done + wave, 1);
    }
  }

  const int blocks_;  // of 64 columns of I
};

}  // namespace mok::sm90
