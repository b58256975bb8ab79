#pragma once

#include <cstdint>
#include <vector>

#include "rack/rank_work.h"
#include "rack/traffic.h"

// The forward kernel on all ranks of a call at once, event by event: clusters claim the items of
// their work lists and wait for what these read, warps pull tokens, output rows leave for their
// homes, all over the same links. With it the moves that stand before or behind the kernel if their
// directions are turned round.
namespace mok::rack {

// Rates of a GPU; seconds and bytes.
struct Machine {
  int32_t sms;
  double link_bytes_per_s;  // each way
  double request_share;     // bytes that a pulled byte's request sends the other way
  double signal_s;
  double pull_bytes_per_s;  // of a pulling warp
  double pull_latency_s;    // what it takes at least
  double look_s;            // its look at 32 rows of the plan
  double step_s;            // 64 of the contraction, for two tiles by 256 columns
  double gate_up_s;         // of an item beside its steps
  double down_s;
};

struct Moves {
  bool dispatch_push;
  bool combine_push;
  PullOrder pull_order;
  double token_bytes;   // of a row that is dispatched
  double output_bytes;  // of an element that is combined
};

enum Waiting : int { kForTokens, kForHidden, kForRing, kForLink, kWaitings };

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
