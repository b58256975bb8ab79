#include "rack/simulation.h"

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <utility>

#include "rack/events.h"
#include "rack/puller.h"
#include "rack/transfers.h"

namespace mok::rack {
namespace {

class Simulation {
 public:
  Simulation(const Sizes& sizes, const std::vector<RankWork>& works, const Machine& machine,
             const Moves& moves, double bin_s)
      : sizes_(sizes),
        works_(works),
        machine_(machine),
        moves_(moves),
        ranks_(static_cast<int32_t>(works.size())),
        transfers_(ranks_, machine, bin_s, &events_),
        moved_(ranks_) {}

  Outcome run() {
    outcome_.push_tokens_s = moves_.dispatch_push ? push_tokens() : 0;
    begin_phase(outcome_.push_tokens_s);
    run_kernels();
    begin_phase(std::ranges::max(outcome_.kernel_s));
    outcome_.pull_rows_s = moves_.combine_push ? 0 : pull_rows();
    outcome_.dispatch = std::move(transfers_.dispatch);
    outcome_.combine = std::move(transfers_.combine);
    return std::move(outcome_);
  }

 private:
  void begin_phase(double after) {
    transfers_.begin_phase(after);
    events_.turn_back();
    moved_.assign(ranks_, 0);
    phase_end_ = 0;
  }

  void run_phase() {
    while (!events_.empty()) {
      const Step step = events_.take_next();
      phase_end_ = std::max(phase_end_, step.at);
      perform(step);
    }
  }

  void perform(const Step& step) {
    switch (step.what) {
      case What::kArrive:
        return arrive(transfers_.arrive(step.index));
      case What::kPull:
        return pullers_[step.rank].ask(step.index);
      case What::kPulled:
        if (pullers_[step.rank].take(step.index)) {
          clusters_[step.rank].start_waiting();
        }
        return;
      case What::kStepsDone:
        return clusters_[step.rank].end_steps(step.index);
      case What::kItemDone:
        return clusters_[step.rank].end_item(step.index);
      case What::kNextPush:
        return push_token(step.rank);
      case What::kNextRow:
        return pull_row(step.rank);
    }
  }

  void arrive(const Transfers::Arrival& arrival) {
    const auto& [transfer, done] = arrival;
    switch (transfer.purpose) {
      case Purpose::kPulledToken:
        return pullers_[transfer.to].arrive(transfer.owner, done);
      case Purpose::kPushedRows:
        return clusters_[transfer.from].arrive(transfer.owner, done);
      case Purpose::kPushedToken:
        phase_end_ = std::max(phase_end_, done);
        return;
      case Purpose::kPulledRow:
        events_.add(std::max(done, transfer.asked + machine_.pull_latency_s), What::kNextRow,
                    transfer.to, 0);
        return;
    }
  }

  void run_kernels() {
    for (int32_t r = 0; r < ranks_; ++r) {
      pullers_.emplace_back(works_[r], machine_, moves_, r, ranks_, &events_, &transfers_);
    }
    for (int32_t r = 0; r < ranks_; ++r) {
      clusters_.emplace_back(sizes_, works_[r], machine_, moves_, r, pullers_[r], &events_,
                             &transfers_);
    }
    run_phase();
    for (int32_t r = 0; r < ranks_; ++r) {
      if (!clusters_[r].are_done()) {
        throw std::logic_error("a cluster of the simulated kernel waits for ever");
      }
      outcome_.kernel_s.push_back(std::max(pullers_[r].end(), clusters_[r].end()));
      outcome_.tokens_s.push_back(pullers_[r].end());
      outcome_.busy_s.push_back(clusters_[r].busy_s());
      for (const double seconds : clusters_[r].waiting_s()) {
        outcome_.waiting_s.push_back(seconds);
      }
    }
  }

  // --- before and behind the kernel

  double push_tokens() {
    for (int32_t r = 0; r < ranks_; ++r) {
      events_.add(0, What::kNextPush, r, 0);
    }
    run_phase();
    return phase_end_ + machine_.signal_s;
  }

  void push_token(int32_t r) {
    const std::vector<int32_t>& targets = works_[r].token_targets;
    if (moved_[r] == targets.size()) {
      return;
    }
    transfers_.send(
        {Purpose::kPushedToken, r, targets[moved_[r]++], 0, moves_.token_bytes, events_.now()});
    events_.add(transfers_.out_free(r), What::kNextPush, r, 0);
  }

  double pull_rows() {
    constexpr int32_t kWarpsPerSm = 8;
    for (int32_t r = 0; r < ranks_; ++r) {
      for (int32_t i = 0; i < machine_.sms * kWarpsPerSm; ++i) {
        events_.add(0, What::kNextRow, r, 0);
      }
    }
    run_phase();
    return phase_end_;
  }

  void pull_row(int32_t r) {
    const std::vector<int32_t>& sources = works_[r].choice_rank;
    size_t& next = moved_[r];
    while (next < sources.size() && (sources[next] < 0 || sources[next] == r)) {
      ++next;
    }
    if (next < sources.size()) {
      transfers_.ask({Purpose::kPulledRow, sources[next++], r, 0,
                      moves_.output_bytes * sizes_.hidden, events_.now()});
    }
  }

  const Sizes& sizes_;
  const std::vector<RankWork>& works_;
  const Machine& machine_;
  const Moves& moves_;
  const int32_t ranks_;
  Events events_;
  Transfers transfers_;
  std::deque<Puller> pullers_;  // clusters keep references to them
  std::deque<Clusters> clusters_;
  std::vector<size_t> moved_;  // [ranks] tokens pushed, or choices looked at
  double phase_end_ = 0;
  Outcome outcome_{};
};

}  // namespace

Outcome simulate(const Sizes& sizes, const std::vector<RankWork>& works, const Machine& machine,
                 const Moves& moves, double bin_s) {
  return Simulation(sizes, works, machine, moves, bin_s).run();
}

}  // namespace mok::rack
