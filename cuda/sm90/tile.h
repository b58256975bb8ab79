#pragma once

#include "core/host_device.h"

// The shape of a block's work, known to the plan's work list, the tensor maps and the kernel.
namespace mok::sm90 {

constexpr int kTileRows = 64;   // rows of one warpgroup; a block takes one or two tiles
constexpr int kBlockTiles = 2;  // = consumer warpgroups
constexpr int kBlockRows = kBlockTiles * kTileRows;
constexpr int kSwizzleBytes = 128;
constexpr int kPanelColumns = 64;  // of bf16, as wide as the swizzle
constexpr int kPanels = 4;         // panels of B in a stage
constexpr int kBlockColumns = kPanels * kPanelColumns;
constexpr int kBlockDepth = 64;  // of the contraction, per stage; 128 bytes of A
constexpr int kStages = 4;

constexpr int kWarpRows = 16;        // rows of one warp in the accumulator of a warpgroup
constexpr int kBytesPerElement = 2;  // bf16
constexpr int kCluster = 2;          // blocks

MOK_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The gate and up products of 128 columns share one accumulator: panels gate, up, gate, up.
MOK_HOST_DEVICE constexpr int gate_up_column_blocks(int inner) {
  return ceil_div(inner, kBlockColumns / 2);
}
MOK_HOST_DEVICE constexpr int down_column_blocks(int hidden) {
  return ceil_div(hidden, kBlockColumns);
}

}  // namespace mok::sm90
