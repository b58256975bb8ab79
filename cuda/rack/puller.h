#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "rack/events.h"
#include "rack/machine.h"
#include "rack/rank_work.h"
#include "rack/transfers.h"

// The pulling warps of one rank, one an SM. A warp looks for its next tokens (until What::kPull),
// asks for them, and has them when the last one is there (What::kPulled).
namespace mok::rack {

class Puller {
 public:
  Puller(const RankWork& work, const Machine& machine, const Moves& moves, int32_t rank,
         int32_t ranks, Events* events, Transfers* transfers);

  // What::kPull
  void ask(int32_t warp);

  // A token of a warp's pull is there at `done`.
  void arrive(int32_t warp, double done);

  // What::kPulled: whether the tokens of more tiles are there now.
  bool take(int32_t warp);

  // Tiles whose tokens are there, with those of all earlier ones; all if none is pulled.
  int32_t tiles_there() const { return tiles_there_; }

  // When the last token was taken.
  double end() const { return end_; }

 private:
  struct Warp {
    size_t position = 0;  // in its pulls
    int32_t coming = 0;   // tokens
    double end = 0;       // of the pull
  };

  void look(int32_t warp);
  bool count_tiles();

  const RankWork& work_;
  const Machine& machine_;
  const Moves& moves_;
  const int32_t rank_;
  Events& events_;
  Transfers& transfers_;
  std::vector<std::vector<Pull>> pulls_;
  std::vector<Warp> warps_;
  std::vector<int32_t> pulled_;  // tokens of each tile
  int32_t tiles_there_ = 0;
  double end_ = 0;
};

}  // namespace mok::rack
