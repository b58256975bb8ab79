#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "core/plan.h"
#include "device/warp.cuh"
#include "sm90/forward.h"
#include "sm90/pipeline.cuh"
#include "sm90/rows.cuh"

// The scheduling warp: claims the next item of the work list for its cluster, waits until whatever
// the item reads is there, finds its rows, and hands it to those who load and multiply.
//
// Clusters claim items when they have room for them. So whichever items are under way at a time are
// neighbours in the list, and share rows and weights in the L2 cache.
namespace mok::sm90 {

template <int kCluster>
class Scheduler {
 public:
  __device__ Scheduler(const ForwardParams& params, SharedStorage& shared, int block_in_cluster)
      : params_(params),
        shared_(shared),
        block_(block_in_cluster),
        lane_(threadIdx.x % kWarp),
        watch_{global_nanoseconds() + params.timeout_ns} {}

  __device__ void run() {
    const ItemRange range = *params_.fault != 0 ? ItemRange{} : *params_.range;
    while (true) {
      Assignment& assignment = shared_.assignments[cursor_.index];
      wait(shared_.taken[cursor_.index], cursor_.parity ^ 1, watch_);
      const int index = range.begin + claim();
      // Whoever has not waited to the end may not write where others may still read; they will
      // not wait for this warp for ever either.
      if (__any_sync(kAllLanes, watch_.late)) {
        *params_.fault = 1;
        return;
      }
      WorkItem item{.flags = WorkItem::kStopFlag};
      if (index < range.end) {
        item = params_.items[index];
        const BlockWork work = block_work(item, block_);
        find_rows(work, assignment.rows);
        await_inputs(work);
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

  // Where the block's rows begin that are read (gate/up: tokens) or written (down: home slots or
  // outputs); null for padding.
  __device__ void find_rows(const BlockWork& work, Element** rows) const {
    const int32_t* const sources = params_.row_source + work.tile * kTileRows;
#pragma unroll
    for (int i = 0; i < kBlockRows / kWarp; ++i) {
      const int row = i * kWarp + lane_;
      const int32_t slot = row < work.tiles * kTileRows ? sources[row] : kPadding;
      const bool is_down = work.product == Product::kDown;
      const RowRing& ring = is_down ? params_.outputs : params_.dispatched;
      if (slot < 0) {
        rows[row] = nullptr;
      } else if (ring.rows != nullptr) {
        rows[row] = element_pointer(place_in(ring, work.tile * kTileRows + row, params_.hidden));
      } else {
        rows[row] = element_pointer(is_down ? home_of(params_, slot) : token_of(params_, slot));
      }
    }
  }

  __device__ static Element* element_pointer(const Bits16* address) {
    return reinterpret_cast<Element*>(const_cast<Bits16*>(address));
  }

  __device__ void await_inputs(const BlockWork& work) {
    if (work.product == Product::kDown) {
      if (lane_ < work.tiles) {
        wait_for_count(params_.hidden_ready + work.tile + lane_,
                       params_.gate_up_columns * kConsumerWarps, watch_);
      }
    } else {
      // The hidden rows that lay in the tiles' place of the ring have been read.
      if (lane_ < work.tiles && work.tile + lane_ >= params_.ring_tiles) {
        wait_for_count(params_.down_done + work.tile + lane_ - params_.ring_tiles,
                       params_.down_columns, watch_);
      }
      if (params_.pulled != nullptr) {
        await_tokens(work.tile + work.tiles);
      }
    }
    __syncwarp();
  }

  // Until the peers' tokens of all tiles before `end` have been pulled.
  __device__ void await_tokens(int32_t end) {
    for (uint32_t tries = 1; there_ < end && !__any_sync(kAllLanes, watch_.late); ++tries) {
      const int32_t tile = there_ + lane_;
      const bool is_there =
          tile >= end || load_acquire(params_.pulled + tile) >= __popcll(params_.to_pull[tile]);
      const unsigned missing = __ballot_sync(kAllLanes, !is_there);
      there_ = tiles_known(there_, end, missing);
      watch_.tried(tries);
    }
  }

  const ForwardParams& params_;
  SharedStorage& shared_;
  const int block_;
  const int lane_;
  AssignmentCursor cursor_;
  Watch watch_;
  bool is_first_ = true;
  int32_t there_ = 0;  // tiles whose tokens are known to be there
};

}  // namespace mok::sm90
