#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

// GPUs around a switch that never blocks: whatever leaves one GPU goes over its port one after the
// other, and so does what comes in at another one.
namespace mok::rack {

// Time in seconds.
class Links {
 public:
  Links(int32_t ranks, double bytes_per_s)
      : seconds_per_byte_(1 / bytes_per_s), out_free_(ranks), in_free_(ranks) {}

  // A transfer that begins to leave at `now` or later: when it begins.
  double leave(int32_t from, double bytes, double now) { return take(out_free_[from], bytes, now); }

  // Its first byte comes at `now`: when the last one is in. To be called in the order of arrivals.
  double enter(int32_t to, double bytes, double now) {
    return take(in_free_[to], bytes, now) + bytes * seconds_per_byte_;
  }

  double out_free(int32_t from) const { return out_free_[from]; }

 private:
  double take(double& free, double bytes, double now) const {
    const double begin = std::max(free, now);
    free = begin + bytes * seconds_per_byte_;
    return begin;
  }

  double seconds_per_byte_;
  std::vector<double> out_free_;
  std::vector<double> in_free_;
};

}  // namespace mok::rack
