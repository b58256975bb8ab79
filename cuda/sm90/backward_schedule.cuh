#pragma once

#include "sm90/backward.h"
#include "sm90/rows.cuh"
#include "sm90/schedule.cuh"

// What the backward kernel's items wait for, and their rows.
namespace mok::sm90 {

// Arrivals at a tile's counter for each column block: every warp that multiplies, each for half the
// columns, or half of them for all.
constexpr int kArrivalsPerColumn = kConsumerWarps;

template <typename Params>
class BackwardScheduler : SchedulerBase<Params> {
  using Base = SchedulerBase<Params>;
  using Base::await_tokens;
  using Base::block_;
  using Base::find_rows;
  using Base::hand_out;
  using Base::lane_;
  using Base::params_;
  using Base::watch_;

 public:
  using Base::Base;

  __device__ void run() {
    const bool skips = *params_.fault != 0 || *params_.skip != 0;
    hand_out(skips ? ItemRange{} : *params_.range,
             [&](const WorkItem& item, Assignment& assignment) { prepare(item, assignment); });
  }

 private:
  __device__ void prepare(const WorkItem& item, Assignment& assignment) {
    const int wave = wave_of(item);
    await_wave(wave);
    const BlockWork work = block_work(item, block_);
    switch (product_of(item)) {
      case BackwardProduct::kReplay:
        find_tokens(work, assignment.rows, params_.x_rows);
        await_tokens(params_.x_pulled, x_there_, work.tile + work.tiles);
        break;
      case BackwardProduct::kHidden:
        find_tokens(work, assignment.rows, params_.dy_rows);
        await_tokens(params_.dy_pulled, dy_there_, work.tile + work.tiles);
        if (params_.waves[wave].replays) {
          await_tiles(params_.replayed, work.tile, work.tile + work.tiles,
                      params_.shape.replay_columns * kArrivalsPerColumn);
        }
        break;
      case BackwardProduct::kInput:
        find_rows(work, assignment.rows, nullptr, [&](int32_t slot, int32_t row) -> const Bits16* {
          return params_.outputs.rows != nullptr ? place_in(params_.outputs, row, params_.hidden)
                                                 : home_of(params_, slot);
        });
        await_tiles(params_.hidden_ready, work.tile, work.tile + work.tiles,
                    params_.shape.hidden_columns * kArrivalsPerColumn);
        break;
      default: {
        const int32_t begin = max(params_.expert_tile[item.expert], params_.waves[wave].first_tile);
        const int32_t end =
            min(params_.expert_tile[item.expert + 1], params_.waves[wave + 1].first_tile);
        if (lane_ == 0) {
          assignment.begin_tile = begin;
          assignment.end_tile = end;
        }
        // Rows of dy are there: the hidden gradients of these tiles have waited for them.
        if (product_of(item) == BackwardProduct::kGateUpWeights) {
          await_tokens(params_.x_pulled, x_there_, end);
        }
        await_tiles(params_.hidden_ready, begin, end,
                    params_.shape.hidden_columns * kArrivalsPerColumn);
      }
    }
    __syncwarp();
  }

  __device__ void find_tokens(const BlockWork& work, Element** rows,
                              const Bits16* const* tokens) const {
#pragma unroll
    for (int row = lane_; row < kBlockRows; row += kWarp) {
      const Bits16* const token =
          row < work.tiles * kTileRows ? tokens[work.tile * kTileRows + row] : params_.zeros;
      rows[row] = reinterpret_cast<Element*>(const_cast<Bits16*>(token));
    }
  }

  // The rings are free for a wave when all before it have been read.
  __device__ void await_wave(int32_t wave) {
    for (; free_wave_ < wave; ++free_wave_) {
      const BackwardWave* const before = params_.waves + free_wave_;
      const int32_t items = params_.shape.last_readers(before[0], before[1].units, kCluster);
      wait_for_count(params_.wave_done + free_wave_, items * kCluster * kConsumerWarps, watch_);
    }
  }

  // Until the counters of tiles [begin, end) have reached `target`.
  __device__ void await_tiles(const uint32_t* counters, int32_t begin, int32_t end,
                              uint32_t target) {
    for (int32_t tile = begin + lane_; tile < end; tile += kWarp) {
      wait_for_count(counters + tile, target, watch_);
    }
  }

  int32_t free_wave_ = 0;  // the last wave known to have the rings
  int32_t x_there_ = 0;    // tiles whose tokens are known to have been pulled
  int32_t dy_there_ = 0;
};

}  // namespace mok::sm90
