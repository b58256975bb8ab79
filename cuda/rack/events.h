#pragma once

#include <cstdint>
#include <queue>
#include <tuple>

// What is still to happen in a simulation, in the order of time.
namespace mok::rack {

enum class What : int32_t {
  kArrive,     // the first byte of a transfer
  kPull,       // a warp asks for its next tokens
  kPulled,     // and has them
  kStepsDone,  // a cluster's products of an item
  kItemDone,   // and all else
  kNextPush,   // of a token, before the kernel
  kNextRow,    // that is pulled behind the kernel
};

// Of what happens at the same time, what was foreseen first goes first.
struct Step {
  double at;
  uint64_t number;
  What what;
  int32_t rank;
  int32_t index;  // of the warp, cluster or transfer

  bool operator<(const Step& other) const {  // the queue's top is the greatest
    return std::tie(other.at, other.number) < std::tie(at, number);
  }
};

class Events {
 public:
  void add(double at, What what, int32_t rank, int32_t index) {
    queue_.push({at, count_++, what, rank, index});
  }
  bool empty() const { return queue_.empty(); }
  Step take_next() {
    const Step step = queue_.top();
    queue_.pop();
    now_ = step.at;
    return step;
  }

  // Of the step that was taken last.
  double now() const { return now_; }
  void turn_back() { now_ = 0; }

 private:
  std::priority_queue<Step> queue_;
  uint64_t count_ = 0;
  double now_ = 0;
};

}  // namespace mok::rack
