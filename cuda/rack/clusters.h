#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "rack/events.h"
#include "rack/machine.h"
#include "rack/puller.h"
#include "rack/rank_work.h"
#include "rack/transfers.h"

// The clusters of one rank: each claims the items of the work list one ahead of what it multiplies,
// and waits for what these read; output rows leave for their homes with the last steps of an item
// (What::kStepsDone), which is done when they are there (What::kItemDone).
namespace mok::rack {

enum Waiting : int { kForTokens, kForHidden, kForRing, kForLink, kWaitings };

class Clusters {
 public:
  Clusters(const Sizes& sizes, const RankWork& work, const Machine& machine, const Moves& moves,
           int32_t rank, const Puller& puller, Events* events, Transfers* transfers);

  // All that wait look again whether they may.
  void start_waiting();

  // What::kStepsDone
  void end_steps(int32_t cluster);

  // Output rows of a cluster's item are at their home at `done`.
  void arrive(int32_t cluster, double done);

  // What::kItemDone
  void end_item(int32_t cluster);

  bool are_done() const;

  // When the last item was done, and its rows known to be home.
  double end() const { return end_; }

  // Seconds, mean over clusters.
  double busy_s() const { return busy_s_ / count(); }
  const std::array<double, kWaitings>& waiting_s() const { return waiting_s_; }

 private:
  struct Cluster {
    int32_t item;  // at work on
    int32_t next;  // claimed
    double idle_since = 0;
    Waiting reason = kForTokens;
    int32_t pushes = 0;  // that have not arrived
    double items_end = 0;
  };

  int32_t count() const { return static_cast<int32_t>(clusters_.size()); }
  int32_t claim();
  void try_to_start(Cluster* cluster);
  bool may_start(const sm90::WorkItem& item, Waiting* reason) const;
  bool has_others_than_own(int32_t begin, int32_t end) const;
  void gather_pushes(const sm90::BlockWork& work, int32_t tile);
  template <typename OfTile>
  void each_tile(const sm90::WorkItem& item, const OfTile& of_tile) const;

  const Sizes& sizes_;
  const RankWork& work_;
  const Machine& machine_;
  const Moves& moves_;
  const int32_t rank_;
  const Puller& puller_;
  Events& events_;
  Transfers& transfers_;
  std::vector<Cluster> clusters_;
  int32_t next_item_ = 0;
  std::vector<int32_t> hidden_ready_, down_done_;  // column blocks of each tile
  std::vector<std::pair<int32_t, double>> homes_;  // of an item's rows, and their elements
  double end_ = 0;
  double busy_s_ = 0;  // of all
  std::array<double, kWaitings> waiting_s_{};
};

}  // namespace mok::rack
