#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "core/plan.h"
#include "device/warp.cuh"
#include "sm90/backward.h"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"

// The backward kernel's scheduling warp: as that of the forward kernel, schedule.cuh.
namespace mok::sm90 {

// Arrivals at a tile's counter for each column block: every warp that multiplies, each for half the
// columns, or half of them for all.
constexpr int kArrivalsPerColumn = kConsumerWarps;

template <int kCluster>
class BackwardScheduler {
 public:
  __device__ BackwardScheduler(const BackwardParams& params, SharedStorage& shared,
                               int block_in_cluster)
      : params_(params),
        shared_(shared),
        block_(block_in_cluster),
        lane_(threadIdx.x % kWarp),
        watch_{global_nanoseconds() + params.timeout_ns} {}

  __device__ void run() {
    const int count = *params_.fault != 0 || *params_.skip != 0 ? 0 : *params_.item_count;
    while (true) {
      Assignment& assignment = shared_.assignments[cursor_.index];
      wait(shared_.taken[cursor_.index], cursor_.parity ^ 1, watch_);
      const int index = claim();
      if (__any_sync(kAllLanes, watch_.late)) {
        *params_.fault = 1;
        return;
      }
      WorkItem item{.flags = WorkItem::kStopFlag};
      if (index < count) {
        item = params_.items[index];
        prepare(item, assignment);
      }
      if (lane_ == 0) {
        assignment.item = item;
      }
      __syncwarp();
      if (lane_ == 0) {
        shared_.assigned[cursor_.index].arrive();
      }
      if (item.flags & WorkItem::kStopFlag) {
        return;
      }
      cursor_.advance();
    }
  }

 private:
  // The same index in all blocks of the cluster; the first items go one to a cluster.
  __device__ int claim() {
    TransactionBarrier& claimed = shared_.claimed[cursor_.index];
    uint32_t& index = shared_.claims[cursor_.index];
    if (lane_ == 0) {
      claimed.arrive_and_expect_tx(sizeof(index));
      if (block_ == 0 && !watch_.late) {
        const uint32_t clusters = gridDim.x / kCluster;
        const uint32_t next =
            is_first_ ? blockIdx.x / kCluster : clusters + atomicAdd(params_.next_item, 1u);
        for (int block = 0; block < kCluster; ++block) {
          cute::store_shared_remote(next, cute::cast_smem_ptr_to_uint(&index),
                                    cute::cast_smem_ptr_to_uint(&claimed), block);
        }
      }
    }
    is_first_ = false;
    wait(claimed, cursor_.parity, watch_);
    return *static_cast<volatile uint32_t*>(&index);
  }

  __device__ void prepare(const WorkItem& item, Assignment& assignment) {
    const int wave = wave_of(item);
    await_wave(wave);
    const BlockWork work = block_work(item, block_);
    switch (product_of(item)) {
      case BackwardProduct::kReplay:
        find_rows(work, assignment.rows,
                  [&](int32_t slot) { return token_of(slot, params_.x, params_.received_x); });
        await_tokens(work.tile + work.tiles);
        break;
      case BackwardProduct::kHidden:
        find_rows(work, assignment.rows,
                  [&](int32_t slot) { return token_of(slot, params_.dy, params_.received_dy); });
        await_tokens(work.tile + work.tiles);
        if (params_.waves[wave].replays) {
          await_tiles(params_.replayed, work.tile, work.tile + work.tiles,
                      params_.shape.replay_columns * kArrivalsPerColumn);
        }
        break;
      case BackwardProduct::kInput:
        find_rows(work, assignment.rows, [&](int32_t slot) { return home_of(slot); });
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
        await_tokens(end);
        await_tiles(params_.hidden_ready, begin, end,
                    params_.shape.hidden_columns * kArrivalsPerColumn);
      }
    }
    __syncwarp();
  }

  template <typename Find>
  __device__ void find_rows(const BlockWork& work, Element** rows, const Find& find) const {
    const int32_t* const sources = params_.row_source + work.tile * kTileRows;
#pragma unroll
    for (int i = 0; i < kBlockRows / kWarp; ++i) {
      const int row = i * kWarp + lane_;
      const int32_t slot = row < work.tiles * kTileRows ? sources[row] : kPadding;
      rows[row] = slot < 0 ? nullptr : reinterpret_cast<Element*>(const_cast<Bits16*>(find(slot)));
    }
  }

  __device__ const Bits16* token_of(int32_t slot, const Bits16* own, const Bits16* received) const {
    const int32_t token = slot / params_.top_k;
    const int32_t in_rank = token - params_.rank * params_.tokens;
    const bool is_own = in_rank >= 0 && in_rank < params_.tokens;
    return (is_own ? own : received) + int64_t{is_own ? in_rank : token} * params_.hidden;
  }

  __device__ const Bits16* home_of(int32_t slot) const {
    const int32_t rank = slot / params_.choices;
    const int64_t choice = slot - rank * params_.choices;
    const Bits16* const slots =
        params_.bases == nullptr
            ? params_.own_slots
            : reinterpret_cast<const Bits16*>(params_.bases[rank] + params_.slots_offset);
    return slots + choice * params_.hidden;
  }

  // The rings are free for a wave when all before it have been read; some of those may be empty.
  __device__ void await_wave(int32_t wave) {
    for (; free_wave_ < wave; ++free_wave_) {
      const BackwardWave& before = params_.waves[free_wave_];
      const Units units = params_.waves[free_wave_ + 1].units - before.units;
      const int32_t items = units.items(params_.shape.input_columns, kCluster) +
                            before.experts * params_.shape.items_of_expert();
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

  // Until the peers' tokens of all tiles before `end` have been pulled.
  __device__ void await_tokens(int32_t end) {
    if (params_.pulled == nullptr) {
      return;
    }
    for (uint32_t tries = 1; there_ < end && !__any_sync(kAllLanes, watch_.late); ++tries) {
      const int32_t tile = there_ + lane_;
      const bool is_there =
          tile >= end || load_acquire(params_.pulled + tile) >= __popcll(params_.to_pull[tile]);
      const unsigned missing = __ballot_sync(kAllLanes, !is_there);
      there_ = tiles_known(there_, end, missing);
      watch_.tried(tries);
    }
  }

  const BackwardParams& params_;
  SharedStorage& shared_;
  const int block_;
  const int lane_;
  AssignmentCursor cursor_;
  Watch watch_;
  bool is_first_ = true;
  int32_t there_ = 0;      // tiles whose tokens are known to be there
  int32_t free_wave_ = 0;  // the last wave known to have the rings
};

}  // namespace mok::sm90
