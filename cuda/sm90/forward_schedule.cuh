#pragma once

#include "sm90/rows.cuh"
#include "sm90/schedule.cuh"

// What the forward kernel's items wait for, and their rows.
namespace mok::sm90 {

template <typename Params>
class ForwardScheduler : SchedulerBase<Params> {
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
    const ItemRange range = *params_.fault != 0 ? ItemRange{} : *params_.range;
    hand_out(range, [&](const WorkItem& item, Assignment& assignment) {
      const BlockWork work = block_work(item, block_);
      const bool is_down = work.product == Product::kDown;
      const RowRing& ring = is_down ? params_.outputs : params_.dispatched;
      bool is_received = false;  // any of this lane's tokens
      find_rows(work, assignment.rows, is_down ? nullptr : params_.zeros,
                [&](int32_t slot, int32_t row) -> const Bits16* {
                  is_received |= slot / params_.choices != params_.rank;
                  if (ring.rows != nullptr) {
                    return place_in(ring, row, params_.hidden);
                  }
                  return is_down ? home_of(params_, slot)
                                 : token_of(params_, params_.x, params_.received, params_.x_offset,
                                            slot);
                });
      await_inputs(work, __any_sync(kAllLanes, is_received));
    });
  }

 private:
  __device__ void await_inputs(const BlockWork& work, bool reads_received) {
    if (work.product == Product::kDown) {
      if (lane_ < work.tiles) {
        wait_for_count(params_.hidden_ready + work.tile + lane_,
                       params_.gate_up_columns * kConsumerWarps, watch_);
      }
    } else {
      // The hidden rows that lay in the tiles' place of the ring have been read.
      const int32_t former =
          lane_ < work.tiles ? former_tile(work.tile + lane_, params_.ring_tiles) : -1;
      if (former >= 0) {
        wait_for_count(params_.down_done + former, params_.down_columns, watch_);
      }
      if (reads_received) {  // this rank's own are there before the kernel begins
        await_tokens(params_.pulled, tokens_there_, work.tile + work.tiles);
      }
    }
    __syncwarp();
  }

  int32_t tokens_there_ = 0;  // tiles whose tokens are known to have been pulled
};

}  // namespace mok::sm90
