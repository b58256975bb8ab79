#pragma once

#include <cstdint>

#include "device/clock.cuh"
#include "device/inject.cuh"
#include "device/warp.cuh"
#include "sm90/epilogue.cuh"
#include "sm90/multiply.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/ptx.cuh"
#include "sm90/record.cuh"

// One of the two warpgroups that multiply: takes items as the scheduling warp hands them out, and
// sends their products on.
namespace mok::sm90 {

// What the kernels' multiplying warpgroups have in common.
template <typename Multiplier, typename Params>
class MultiplierBase {
 public:
  __device__ MultiplierBase(const Params& params, SharedStorage& shared, int block_in_cluster,
                            int half)
      : params_(params),
        shared_(shared),
        block_(block_in_cluster),
        half_(half),
        warp_(threadIdx.x % kWarpgroup / kWarp),
        lane_(threadIdx.x % kWarp),
        watch_{global_nanoseconds() + params.timeout_ns} {}

 protected:
  // Has the items performed by Multiplier::perform(assignment, taken, accumulators), which arrives
  // at `taken` when it needs the assignment no more.
  __device__ __forceinline__ void perform_items() {
    float accumulators[kAccumulators];  // one array for all products, lest ptxas keeps several
    AssignmentCursor cursor;
    while (true) {
      await(shared_.assigned[cursor.index], cursor.parity);
      // All threads of a warpgroup stop at the same item, because its products need all of them.
      // Whoever has not waited to the end may not read what is in shared memory.
      if (any_of_warpgroup(1 + half_, watch_.late)) {
        *params_.fault = 1;
        break;
      }
      const Assignment& assignment = shared_.assignments[cursor.index];
      if (assignment.item.flags & WorkItem::kStopFlag) {
        break;
      }
      if (is_recorder()) {
        const BlockWork work = block_work(assignment.item, block_);
        record_begin(params_, TimelineRole::kMultiply, work.tile, work.column_block,
                     assignment.item.flags);
      }
      static_cast<Multiplier*>(this)->perform(assignment, shared_.taken[cursor.index],
                                              accumulators);
      if (is_recorder()) {
        record_end(params_, TimelineRole::kMultiply);
      }
      cursor.advance();
    }
    announce();
  }

  // Waits for an item or its first stage. Whatever it takes may depend on what has not been
  // announced.
  __device__ void await(const Barrier& barrier, uint32_t parity) {
    if (!__all_sync(kAllLanes, barrier.test_wait(parity))) {
      announce();
      wait(barrier, parity, watch_);
    }
  }

  // A block's two tiles go to a warpgroup each; of a single tile, each takes half the columns.
  template <Major kMajorB>
  __device__ __forceinline__ void multiply_tiles(const BlockWork& work, int steps,
                                                 float (&accumulators)[kAccumulators]) {
    await(shared_.full[cursor_.index], cursor_.parity);
    const auto meanwhile = [&] { announce(); };
    if (work.tiles == kBlockTiles) {
      multiply<kBlockColumns, Major::K, kMajorB, false>(shared_, cursor_, watch_, steps, half_, 0,
                                                        accumulators, meanwhile);
    } else {
      multiply<kBlockColumns / 2, Major::K, kMajorB, false>(shared_, cursor_, watch_, steps, 0,
                                                            half_, accumulators, meanwhile);
    }
    record_products();
  }

  // For the timeline: the results can leave now.
  __device__ void record_products() const {
    if (is_recorder()) {
      record_middle(params_, TimelineRole::kMultiply);
    }
  }

  __device__ int tile_of(const BlockWork& work) const {
    return work.tile + (work.tiles == kBlockTiles ? half_ : 0);
  }

  // Where the rows go that this thread will store.
  __device__ void read_homes(const BlockWork& work, const Assignment& assignment,
                             Element* (&rows)[kStores]) const {
    const int first_row = work.tiles == kBlockTiles ? half_ * kTileRows : 0;
    Element* const* const homes = assignment.rows + first_row + warp_ * kWarpRows + lane_ / 8;
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      rows[i] = watch_.late ? nullptr : homes[i * kRowsPerStore];
    }
    __syncwarp();
  }

  // Sends a block of columns of H to the rows' places.
  __device__ __forceinline__ void push(const BlockWork& work, Element* const (&rows)[kStores],
                                       const float (&accumulators)[kAccumulators]) {
    const bool two_tiles = work.tiles == kBlockTiles;
    const int column =
        work.column_block * kBlockColumns + (two_tiles ? 0 : half_ * (kBlockColumns / 2));
    announce();
    // A kernel that keeps a timeline lacks the registers.
    if (!Params::kRecords && inject::warp_drops(Hook::kPushRow, receiver(work))) {
      return;
    }
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const int panel_column = column + panel * kPanelColumns;
      if ((panel < kPanels / 2 || two_tiles) && panel_column < params_.hidden) {
        Element* const buffer = staging(panel % kStagingBuffers);
        const float* const values = accumulators + panel * kPanelAccumulators;
#pragma unroll
        for (int group = 0; group < kPanelGroups; ++group) {
          stage_group(buffer, group, [&](int i) { return pack_pair(values, group, i); });
        }
        push_rows(buffer, panel_column, rows);
      }
    }
    __syncwarp();
  }

  // Has `counter` told, when this warp's stores so far have arrived, so many warps' worth of
  // arrivals.
  __device__ void announce_later(uint32_t* counter, uint32_t warps) {
    unannounced_ = counter;
    unannounced_warps_ = warps;
  }

  // Tells the readers of the last stores that these have arrived. Put off until there is something
  // to do while the stores end, but never past a wait: the item waited for may itself wait for
  // them. The staging buffers are free then.
  __device__ void announce() {
    if (unannounced_ != nullptr) {
      __syncwarp();
      if (lane_ == 0) {
        wait_for_bulk_stores();
        fence_proxies_global();
        add_release(unannounced_, unannounced_warps_);
      }
      unannounced_ = nullptr;
      __syncwarp();
    }
  }

  __device__ Element* staging(int buffer) const {
    return shared_.staging[half_ * kWarpgroupWarps + warp_][buffer];
  }

  const Params& params_;
  SharedStorage& shared_;
  const int block_;
  const int half_;
  const int warp_;
  const int lane_;
  StageCursor cursor_;
  Watch watch_;

 private:
  __device__ static bool is_recorder() { return threadIdx.x == kWarpgroup; }

  // The rank that gets one of the warp's rows, if they leave the kernel as pushes; a row a lane.
  __device__ int32_t receiver(const BlockWork& work) const {
    if (params_.outputs.rows != nullptr) {
      return -1;
    }
    const int row = tile_of(work) * kTileRows + warp_ * kWarpRows + lane_ % kWarpRows;
    const int32_t slot = params_.row_source[row];
    return slot < 0 ? -1 : slot / params_.choices;
  }

  uint32_t* unannounced_ = nullptr;
  uint32_t unannounced_warps_ = 0;
};

}  // namespace mok::sm90
