#pragma once

#include "sm90/forward.h"
#include "sm90/load.cuh"

// What the forward kernel's stages are filled with.
namespace mok::sm90 {

class ForwardLoader : LoaderBase<ForwardParams> {
 public:
  using LoaderBase::LoaderBase;

  __device__ void run() {
    load_items([&](const WorkItem& item, int, int) {
      const BlockWork work = block_work(item, block_);
      if (work.product == Product::kGateUp) {
        load_gate_up(work);
      } else {
        load_down(work);
      }
    });
  }

 private:
  __device__ void load_down(const BlockWork& work) {
    const int tile = (work.tile + warp_) % params_.ring_tiles;
    const int steps = params_.inner / kBlockDepth;
    for (int step = 0; step < steps; ++step) {
      if (!begin_stage(kPanels * kPanelBytes + work.tiles * kTileBytes, false)) {
        return;
      }
      copy_panels(work, [&](int panel) {
        return Box{&params_.down, work.column_block * kBlockColumns + panel * kPanelColumns,
                   work.expert * params_.inner + step * kBlockDepth};
      });
      copy_tile(work, {&params_.hidden_tiles, step * kBlockDepth, tile * kTileRows});
      cursor_.advance();
    }
  }
};

}  // namespace mok::sm90
