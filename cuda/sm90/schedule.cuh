#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "core/plan.h"
#include "device/clock.cuh"
#include "device/warp.cuh"
#include "sm90/forward.h"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"
#include "sm90/record.cuh"

// The scheduling warp: claims the next item of the work list for its cluster, waits until whatever
// the item reads is there, finds its rows, and hands it to those who load and multiply.
//
// Clusters claim items when they have room for them. So whichever items are under way at a time are
// neighbours in the list, and share rows and weights in the L2 cache.
namespace mok::sm90 {

// Lanes of the scheduling warp that hand over an item: each the rows that it has found. Kernels
// that keep a timeline or round to MXFP8 lack the registers, and have the first one do it for all.
template <typename Params>
constexpr int kHandingLanesOf = Params::kRecords || Params::kIsMx ? 1 : kWarp;

// What the kernels' scheduling warps have in common.
template <typename Params>
class SchedulerBase {
 public:
  __device__ SchedulerBase(const Params& params, SharedStorage& shared, int block_in_cluster)
      : params_(params),
        shared_(shared),
        block_(block_in_cluster),
        lane_(threadIdx.x % kWarp),
        watch_{global_nanoseconds() + params.timeout_ns} {}

 protected:
  // Hands out the items of the range; prepare(item, assignment) waits for what one reads and
  // finds its rows.
  template <typename Prepare>
  __device__ void hand_out(const ItemRange& range, const Prepare& prepare) {
    while (true) {
      Assignment& assignment = shared_.assignments[cursor_.index];
      wait(shared_.taken[cursor_.index], cursor_.parity ^ 1, watch_);
      const int index = range.begin + claim();
      if (gives_up()) {
        return;
      }
      WorkItem item{.flags = WorkItem::kStopFlag};
      if (index < range.end) {
        item = params_.items[index];
        if (lane_ == 0) {
          record_begin(params_, TimelineRole::kSchedule, item.first_tile, item.column_block,
                       item.flags);
        }
        prepare(item, assignment);
        if (lane_ == 0) {
          record_end(params_, TimelineRole::kSchedule);
        }
        if (gives_up()) {
          return;
        }
      }
      if (lane_ == 0) {
        assignment.item = item;
      }
      if constexpr (kHandingLanes == 1) {
        __syncwarp();
      }
      if (lane_ < kHandingLanes) {
        shared_.assigned[cursor_.index].arrive();
      }
      if (item.flags & WorkItem::kStopFlag) {
        return;
      }
      cursor_.advance();
    }
  }

  // Where the block's rows begin that are read or written: find(slot, row in the plan), or
  // `padding`.
  template <typename Find>
  __device__ void find_rows(const BlockWork& work, Element** rows, const Bits16* padding,
                            const Find& find) const {
    const int32_t* const sources = params_.row_source + work.tile * kTileRows;
#pragma unroll
    for (int i = 0; i < kBlockRows / kWarp; ++i) {
      const int row = i * kWarp + lane_;
      const int32_t slot = row < work.tiles * kTileRows ? sources[row] : kPadding;
      const Bits16* const begin = slot < 0 ? padding : find(slot, work.tile * kTileRows + row);
      rows[row] = reinterpret_cast<Element*>(const_cast<Bits16*>(begin));
    }
  }

  // Until the peers' tokens of all tiles before `end` have been pulled, by their counters (null: of
  // themselves); those before `there` are known to be.
  __device__ void await_tokens(const uint32_t* pulled, int32_t& there, int32_t end) {
    if (pulled == nullptr) {
      return;
    }
    for (uint32_t tries = 1; there < end && !__any_sync(kAllLanes, watch_.late); ++tries) {
      const int32_t tile = there + lane_;
      const bool is_there =
          tile >= end || load_acquire(pulled + tile) >= __popcll(params_.to_pull[tile]);
      const unsigned missing = __ballot_sync(kAllLanes, !is_there);
      there = tiles_known(there, end, missing);
      watch_.tried(tries);
    }
  }

  const Params& params_;
  SharedStorage& shared_;
  const int block_;
  const int lane_;
  Watch watch_;

 private:
  static constexpr int kHandingLanes = kHandingLanesOf<Params>;

  // Whoever has not waited to the end may neither write where others may still read nor hand over
  // an item whose inputs are missing; the others will not wait for this warp for ever either.
  __device__ bool gives_up() {
    const bool is_late = __any_sync(kAllLanes, watch_.late);
    if (is_late) {
      *params_.fault = 1;
    }
    return is_late;
  }

  // The same index in all blocks of the cluster.
  __device__ int claim() {
    TransactionBarrier& claimed = shared_.claimed[cursor_.index];
    uint32_t& index = shared_.claims[cursor_.index];
    if (lane_ == 0) {
      claimed.arrive_and_expect_tx(sizeof(index));
      if (block_ == 0 && !watch_.late) {
        // The first items go one to a cluster, before any cluster claims its second.
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

  AssignmentCursor cursor_;
  bool is_first_ = true;
};

}  // namespace mok::sm90
