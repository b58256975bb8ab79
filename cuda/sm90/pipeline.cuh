#pragma once

#include <cutlass/bfloat16.h>

#include <cstdint>

#include "sm90/tile.h"
#include "sm90/watch.cuh"

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

struct alignas(1024) SharedStorage {
  Element a[kStages][kBlockRows * kBlockDepth];
  Element b[kStages][kPanels][kBlockDepth * kPanelColumns];
  Element staging[kConsumerWarps][kStagingBuffers][kWarpRows * kPanelColumns];
  alignas(8) TransactionBarrier full[kStages];
  alignas(8) Barrier empty[kStages];
};

// Position in the ring of stages; the parity tells the rounds apart.
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace mok::sm90
