#pragma once

#include <vector>

#include "rack/clusters.h"
#include "rack/machine.h"
#include "rack/rank_work.h"
#include "rack/traffic.h"

// The forward kernel on all ranks of a call at once, event by event: clusters work through their
// lists (rack/clusters.h), warps pull tokens (rack/puller.h), output rows leave for their homes,
// all over the same links. With it the moves that stand before or behind the kernel if their
// directions are turned round.
namespace mok::rack {

struct Outcome {
  double push_tokens_s;           // before the kernel, until they have been seen everywhere
  std::vector<double> kernel_s;   // [ranks]
  double pull_rows_s;             // behind it
  std::vector<double> tokens_s;   // [ranks] from the kernel's start until its last token is there
  std::vector<double> busy_s;     // [ranks] mean over clusters
  std::vector<double> waiting_s;  // [ranks, kWaitings] likewise
  Traffic dispatch;
  Traffic combine;
};

// The ranks begin together.
Outcome simulate(const Sizes& sizes, const std::vector<RankWork>& works, const Machine& machine,
                 const Moves& moves, double bin_s);

}  // namespace mok::rack
