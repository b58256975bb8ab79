#pragma once

#include <cutlass/bfloat16.h>

#include <cstdint>

#include "sm90/tile.h"
#include "sm90/watch.cuh"
#include "sm90/work.h"

// Shared memory and who may touch it when: a ring of stages between the loading warpgroup and the
// two that multiply.
namespace mok::sm90 {

using Element = cutlass::bfloat16_t;

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kConsumerWarps = kBlockTiles * kWarpgroup / kWarp;
constexpr int kThreads = (1 + kBlockTiles) * kWarpgroup;
constexpr int kStagingBuffers = 2;  // per warp, so that a panel is packed while one is stored

// Arrivals that fill a stage: one thread announces the bytes of the tensor copies, and every
// loading thread its own copies of gathered rows.
constexpr int kFillArrivals = 1 + kWarpgroup;

// An item is written before its first stage is filled and read once that has happened. With a stage
// to an item the loading warpgroup is at most as many items ahead as there are stages.
constexpr int kItems = 2 * kStages;

// Home rows of two parts of items: of one whose outputs are being pushed and of the next.
constexpr int kHomes = 2;

struct alignas(1024) SharedStorage {
  Element a[kStages][kBlockRows * kBlockDepth];
  Element b[kStages][kPanels][kBlockDepth * kPanelColumns];
  Element staging[kConsumerWarps][kStagingBuffers][kWarpRows * kPanelColumns];
  WorkItem items[kItems];
  Element* homes[kHomes][kBlockRows];
  alignas(8) TransactionBarrier full[kStages];
  alignas(8) Barrier empty[kStages];
  alignas(8) Barrier homes_read[kHomes];
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);

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
using HomeCursor = RingCursor<kHomes>;

}  // namespace mok::sm90
