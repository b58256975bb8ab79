#pragma once

#include "core/host_device.h"
#include "core/mx.h"
#include "sm90/tile.h"

// What a thread holds of a warp's accumulators: for every eight columns two neighbouring values of
// row lane / 4, from column lane % 4 * 2 on, and the same two of the row eight below.
namespace mok::sm90 {

// 16 columns of a warp's 16 rows: what a thread holds of them, and what one instruction stages.
constexpr int kGroupColumns = 16;
constexpr int kPanelGroups = kPanelColumns / kGroupColumns;
constexpr int kGroupWords = kGroupColumns * kWarpRows / 32 / 2;  // of two bf16

// Of a block of MXFP8, 32 columns of a row, four neighbouring lanes have eight values each; and as
// many of the row eight below.
constexpr int kPanelBlocks = kPanelColumns / kMxBlock;
constexpr int kBlockGroups = kMxBlock / kGroupColumns;
constexpr int kBlockValues = kMxBlock / 4;
constexpr int kHalves = 2;  // the row, and that eight below

// A word of two values among a thread's of a block.
struct BlockWord {
  int group;  // of the block's
  int index;  // of the group's words
};

// That of a row half's `value`-th and next one, `value` being even.
MOK_HOST_DEVICE constexpr BlockWord block_word(int half, int value) {
  return {value / 4, value % 4 / 2 * kHalves + half};
}

// Its place among the words of a panel.
MOK_HOST_DEVICE constexpr int word_of_panel(int block, BlockWord word) {
  return (block * kBlockGroups + word.group) * kGroupWords + word.index;
}

}  // namespace mok::sm90
