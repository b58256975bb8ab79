#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "mbarrier.h"

// What there is in stages_model.h.
namespace stages_model {

constexpr int kMostBlocks = 2;
constexpr int kMostWarps = 2;  // of a kind in a block
constexpr int kMostStages = 2;

// What a stage gets in a step.
enum class Fill : uint8_t {
  kCopies,     // tensor copies of every loading warp, each for all blocks
  kGathers,    // likewise, and rows that each loading warp gathers, with an arrival behind them
  kFirstOnly,  // a copy of the first loading warp, for its own block
};

enum class Bug {
  kNone,
  kReleasesLate,     // late multipliers release stages
  kWaitsAgain,       // late multipliers wait for further stages, and release them
  kAwaitsNoRoom,     // stages are filled without a wait for room
  kLoadsLate,        // late loaders carry on
  kCountsOwnBlock,   // a stage has room when its own block has released it
  kCountsNoGathers,  // a stage is full when its tensor copies have come
  kReleasesEarly,    // stages are released when their products begin
  kFirstForAll,      // where nothing is gathered, the first loading warp arrives for all
};

struct Settings {
  int blocks;
  int loaders, multipliers;  // warps of each block
  int stages;
  std::vector<std::vector<Fill>> items;  // their steps
  bool expires = true;
  Bug bug = Bug::kNone;
};

// Bits of what comes to a stage: a warp's tensor copy for all blocks or one, and what it gathers.
constexpr int copy_bit(int block, int warp) { return block * kMostWarps + warp; }
constexpr int gather_bit(int warp) { return kMostBlocks * kMostWarps + warp; }

struct Stage {
  Mbarrier full, empty;
  uint8_t step;       // for which it has been filled, from 1
  uint8_t under_way;  // copies and gathered rows, a bit each
  uint8_t here;       // those that have come
};

struct Loader {
  uint8_t step;  // that it will fill a stage for
  uint8_t late;
};

struct Multiplier {
  uint8_t step;  // that it waits for
  uint8_t late;  // a bit for each of the lanes that release stages, to a block each
  auto operator<=>(const Multiplier&) const = default;
};

struct World {
  Stage stages[kMostBlocks][kMostStages];
  Loader loaders[kMostBlocks][kMostWarps];
  Multiplier multipliers[kMostBlocks][kMostWarps];
  uint8_t is_crowded;  // a stage is filled while copies of another step are under way to it
  uint8_t is_misread;  // a stage is read that does not hold its step

  void begin_copy(Stage& stage, int step, int bit) {
    if (stage.step != step + 1) {
      is_crowded |= stage.under_way != 0;
      stage.step = static_cast<uint8_t>(step + 1);
      stage.here = 0;
    }
    stage.under_way |= 1 << bit;
  }
};
static_assert(std::has_unique_object_representations_v<World>);

}  // namespace stages_model
