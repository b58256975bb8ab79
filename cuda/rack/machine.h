#pragma once

#include <cstdint>

#include "rack/rank_work.h"

// What a simulated call runs on, and how it moves rows.
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

}  // namespace mok::rack
