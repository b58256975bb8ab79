#pragma once

#include <cutlass/bfloat16.h>

#include <cstdint>

#include "device/warp.cuh"
#include "sm90/tile.h"
#include "sm90/watch.cuh"
#include "sm90/work.h"

// Shared memory and who may touch it when: assignments from the scheduling warp to all others, and
// a ring of stages between the loading warps and the warpgroups that multiply.
namespace mok::sm90 {

using Element = cutlass::bfloat16_t;

constexpr int kWarpgroup = 128;
constexpr int kWarpgroupWarps = kWarpgroup / kWarp;
constexpr int kConsumerWarps = kBlockTiles * kWarpgroupWarps;
constexpr int kLoadWarps = 2;
constexpr int kThreads = (1 + kBlockTiles) * kWarpgroup;
constexpr int kStagingBuffers = 2;  // per warp, so that a panel is packed while one is stored

// Arrivals that fill a stage: one thread announces the bytes of the tensor copies, and every
// loading thread its own copies of gathered rows.
constexpr int kFillArrivals = 1 + kLoadWarps * kWarp;

// Assignments under way: the one being multiplied and the next.
constexpr int kAssignments = 2;

struct Assignment {
  WorkItem item;
  int32_t begin_tile;  // of the rows contracted over, where a product does that
  int32_t end_tile;
  Element* rows[kBlockRows];  // where they begin: tokens, or home slots, null if none
};

struct alignas(1024) SharedStorage {
  Element a[kStages][kBlockRows * kBlockDepth];
  Element b[kStages][kPanels][kBlockDepth * kPanelColumns];
  Element staging[kConsumerWarps][kStagingBuffers][kWarpRows * kPanelColumns];
  Assignment assignments[kAssignments];
  uint32_t claims[kAssignments];  // positions in the work list
  alignas(8) TransactionBarrier claimed[kAssignments];
  alignas(8) Barrier assigned[kAssignments];
  alignas(8) Barrier taken[kAssignments];  // nobody in the cluster needs the assignment any more
  alignas(8) TransactionBarrier full[kStages];
  alignas(8) Barrier empty[kStages];
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);

// By one thread of the block.
__device__ inline void init_barriers(SharedStorage& shared, int handing_lanes) {
  for (int stage = 0; stage < kStages; ++stage) {
    shared.full[stage].init(kFillArrivals);
    shared.empty[stage].init(kConsumerWarps * kCluster);
  }
  for (int i = 0; i < kAssignments; ++i) {
    shared.claimed[i].init(1);
    shared.assigned[i].init(handing_lanes);
    shared.taken[i].init((kLoadWarps + kConsumerWarps) * kCluster);
  }
  cutlass::arch::fence_barrier_init();
}

// A warp's arrival at the same barrier of every block of the cluster. All lanes call it.
__device__ inline void arrive_in_cluster(const Barrier& barrier) {
  const int lane = threadIdx.x % kWarp;
  if (lane < kCluster) {
    barrier.arrive(lane);
  }
}

// This warp reads the stage no more. Whoever has not waited for it to be full does not say so: it
// would be filled again while copies to it are under way, and its barrier told of more arrivals
// than it expects. All lanes call it.
__device__ inline void release_stage(const Barrier& empty, const Watch& watch) {
  if (!watch.late) {
    arrive_in_cluster(empty);
  }
}

// Position in a ring of buffers; the parity tells the rounds apart.
template <int kSize>
struct RingCursor {
  int index = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
};
using StageCursor = RingCursor<kStages>;
using AssignmentCursor = RingCursor<kAssignments>;

}  // namespace mok::sm90
