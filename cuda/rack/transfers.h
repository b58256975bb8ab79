#pragma once

#include <cstdint>
#include <vector>

#include "rack/events.h"
#include "rack/links.h"
#include "rack/machine.h"
#include "rack/traffic.h"

// What is on its way between ranks.
namespace mok::rack {

enum class Purpose : int32_t { kPulledToken, kPushedRows, kPushedToken, kPulledRow };

struct Transfer {
  Purpose purpose;
  int32_t from;
  int32_t to;
  int32_t owner;  // warp or cluster
  double bytes;
  double asked;
};

// Each arrives at What::kArrive.
class Transfers {
 public:
  Transfers(int32_t ranks, const Machine& machine, double bin_s, Events* events);

  // Links are free again, and time is counted from `after` a phase that has ended.
  void begin_phase(double after);

  void send(const Transfer& transfer);

  // A pull: the request goes the other way.
  void ask(const Transfer& transfer);

  double out_free(int32_t from) const { return links_.out_free(from); }

  // The first byte of a transfer is there now: the transfer, and when the last one is. To be called
  // once.
  struct Arrival {
    Transfer transfer;
    double done;
  };
  Arrival arrive(int32_t index);

  Traffic dispatch, combine;

 private:
  const Machine& machine_;
  const int32_t ranks_;
  const double bin_s_;
  Events& events_;
  Links links_;
  double origin_ = 0;  // of the phase
  std::vector<Transfer> transfers_;
  std::vector<int32_t> free_;
};

}  // namespace mok::rack
