#include "rack/simulation.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "rack/events.h"
#include "rack/links.h"

namespace mok::rack {
namespace {

using sm90::BlockWork;
using sm90::Product;
using sm90::WorkItem;

constexpr int32_t kNone = -1;

enum class Purpose : int32_t { kPulledToken, kPushedRows, kPushedToken, kPulledRow };

struct Transfer {
  Purpose purpose;
  int32_t from;
  int32_t to;
  int32_t owner;  // warp or cluster
  double bytes;
  double asked;
};

struct Cluster {
  int32_t item = kNone;  // at work on
  int32_t next = kNone;  // claimed
  double idle_since = 0;
  Waiting reason = kForTokens;
  int32_t pushes = 0;  // that have not arrived
  double items_end = 0;
};

struct PullingWarp {
  size_t position = 0;  // in its pulls
  int32_t coming = 0;   // tokens
  double end = 0;       // of the pull
};

struct Rank {
  int32_t next_item = 0;
  int32_t tokens_there = 0;  // tiles
  std::vector<int32_t> pulled, hidden_ready, down_done;
  std::vector<Cluster> clusters;
  std::vector<std::vector<Pull>> pulls;
  std::vector<PullingWarp> warps;
  size_t pushed_tokens = 0;
  size_t pulled_rows = 0;
  double end = 0;
};

class Simulation {
 public:
  Simulation(const Sizes& sizes, const std::vector<RankWork>& works, const Machine& machine,
             const Moves& moves, double bin_s)
      : sizes_(sizes),
        works_(works),
        machine_(machine),
        moves_(moves),
        bin_s_(bin_s),
        count_(static_cast<int32_t>(works.size())),
        clusters_(machine.sms / sm90::kCluster),
        links_(count_, machine.link_bytes_per_s) {
    outcome_.dispatch.bytes.resize(count_ * count_);
    outcome_.combine.bytes.resize(count_ * count_);
    outcome_.kernel_s.resize(count_);
    outcome_.tokens_s.resize(count_);
    outcome_.busy_s.resize(count_);
    outcome_.waiting_s.resize(count_ * kWaitings);
  }

  Outcome run() {
    outcome_.push_tokens_s = moves_.dispatch_push ? push_tokens() : 0;
    begin_phase(outcome_.push_tokens_s);
    run_kernels();
    double end = 0;
    for (int32_t r = 0; r < count_; ++r) {
      outcome_.kernel_s[r] = ranks_[r].end;
      end = std::max(end, ranks_[r].end);
    }
    begin_phase(end);
    outcome_.pull_rows_s = moves_.combine_push ? 0 : pull_rows();
    return std::move(outcome_);
  }

 private:
  // --- events

  void at(double time, What what, int32_t rank, int32_t index) {
    events_.add(time, what, rank, index);
  }

  void begin_phase(double after) {
    origin_ += after;
    now_ = 0;
    phase_end_ = 0;
    links_ = Links(count_, machine_.link_bytes_per_s);
  }

  void run_phase() {
    while (!events_.empty()) {
      const Step step = events_.take_next();
      now_ = step.at;
      phase_end_ = std::max(phase_end_, now_);
      perform(step);
    }
  }

  void perform(const Step& step) {
    switch (step.what) {
      case What::kArrive:
        return arrive(step.index);
      case What::kPull:
        return pull(step.rank, step.index);
      case What::kPulled:
        return take_tokens(step.rank, step.index);
      case What::kStepsDone:
        return end_steps(step.rank, step.index);
      case What::kItemDone:
        return end_item(step.rank, step.index);
      case What::kNextPush:
        return push_token(step.rank);
      case What::kNextRow:
        return pull_row(step.rank);
    }
  }

  // --- transfers

  void send(const Transfer& transfer) {
    int32_t index = static_cast<int32_t>(transfers_.size());
    if (free_.empty()) {
      transfers_.push_back(transfer);
    } else {
      index = free_.back();
      free_.pop_back();
      transfers_[index] = transfer;
    }
    at(links_.leave(transfer.from, transfer.bytes, now_), What::kArrive, transfer.from, index);
  }

  void arrive(int32_t index) {
    const Transfer transfer = transfers_[index];
    free_.push_back(index);
    const double done = links_.enter(transfer.to, transfer.bytes, now_);
    record(transfer, done);
    switch (transfer.purpose) {
      case Purpose::kPulledToken: {
        PullingWarp& warp = ranks_[transfer.to].warps[transfer.owner];
        warp.end = std::max(warp.end, done);
        if (--warp.coming == 0) {
          at(warp.end, What::kPulled, transfer.to, transfer.owner);
        }
        return;
      }
      case Purpose::kPushedRows: {
        Rank& rank = ranks_[transfer.from];
        Cluster& cluster = rank.clusters[transfer.owner];
        rank.end = std::max(rank.end, done + machine_.signal_s);
        if (done > cluster.items_end) {
          outcome_.waiting_s[transfer.from * kWaitings + kForLink] +=
              (done - cluster.items_end) / clusters_;
          cluster.items_end = done;
        }
        if (--cluster.pushes == 0) {
          at(cluster.items_end, What::kItemDone, transfer.from, transfer.owner);
        }
        return;
      }
      case Purpose::kPushedToken:
        phase_end_ = std::max(phase_end_, done);
        return;
      case Purpose::kPulledRow:
        at(std::max(done, transfer.asked + machine_.pull_latency_s), What::kNextRow, transfer.to,
           0);
        return;
    }
  }

  void record(const Transfer& transfer, double done) {
    const bool is_token =
        transfer.purpose == Purpose::kPulledToken || transfer.purpose == Purpose::kPushedToken;
    Traffic& traffic = is_token ? outcome_.dispatch : outcome_.combine;
    traffic.add(count_, transfer.from, transfer.to, transfer.bytes,
                static_cast<size_t>((origin_ + done) / bin_s_));
  }

  // --- before and behind the kernel

  double push_tokens() {
    ranks_.assign(count_, {});
    for (int32_t r = 0; r < count_; ++r) {
      at(0, What::kNextPush, r, 0);
    }
    run_phase();
    return phase_end_ + machine_.signal_s;
  }

  void push_token(int32_t r) {
    const std::vector<int32_t>& targets = works_[r].token_targets;
    if (ranks_[r].pushed_tokens == targets.size()) {
      return;
    }
    send({Purpose::kPushedToken, r, targets[ranks_[r].pushed_tokens++], 0, moves_.token_bytes,
          now_});
    at(links_.out_free(r), What::kNextPush, r, 0);
  }

  double pull_rows() {
    constexpr int32_t kWarpsPerSm = 8;
    for (int32_t r = 0; r < count_; ++r) {
      for (int32_t i = 0; i < machine_.sms * kWarpsPerSm; ++i) {
        at(0, What::kNextRow, r, 0);
      }
    }
    run_phase();
    return phase_end_;
  }

  void pull_row(int32_t r) {
    const std::vector<int32_t>& sources = works_[r].choice_rank;
    size_t& next = ranks_[r].pulled_rows;
    while (next < sources.size() && (sources[next] < 0 || sources[next] == r)) {
      ++next;
    }
    if (next < sources.size()) {
      ask({Purpose::kPulledRow, sources[next++], r, 0, moves_.output_bytes * sizes_.hidden, now_});
    }
  }

  // A pull: the request goes the other way.
  void ask(const Transfer& transfer) {
    const double request = transfer.bytes * machine_.request_share;
    links_.leave(transfer.to, request, now_);
    links_.enter(transfer.from, request, now_);
    send(transfer);
  }

  // --- the kernel

  void run_kernels() {
    ranks_.assign(count_, {});
    for (int32_t r = 0; r < count_; ++r) {
      Rank& rank = ranks_[r];
      const RankWork& work = works_[r];
      rank.pulled.resize(work.tiles());
      rank.hidden_ready.resize(work.tiles());
      rank.down_done.resize(work.tiles());
      rank.clusters.resize(clusters_);
      rank.warps.resize(machine_.sms);
      if (moves_.dispatch_push) {
        rank.tokens_there = work.tiles();
        rank.pulls.resize(machine_.sms);
      } else {
        rank.pulls = pulls_of(work, moves_.pull_order, r, count_, machine_.sms);
        see_tokens(r);
      }
      for (int32_t warp = 0; warp < machine_.sms; ++warp) {
        look(r, warp);
      }
    }
    for (int32_t r = 0; r < count_; ++r) {
      for (int32_t c = 0; c < clusters_; ++c) {  // the first items go one to a cluster
        claim(r, c);
      }
      for (int32_t c = 0; c < clusters_; ++c) {
        try_to_start(r, c);
      }
    }
    run_phase();
    for (int32_t r = 0; r < count_; ++r) {
      const bool is_done = std::ranges::all_of(ranks_[r].clusters, [](const Cluster& cluster) {
        return cluster.item == kNone && cluster.next == kNone;
      });
      if (!is_done) {
        throw std::logic_error("a cluster of the simulated kernel waits for ever");
      }
      outcome_.busy_s[r] /= clusters_;
    }
  }

  // A warp looks for its next tokens.
  void look(int32_t r, int32_t warp) {
    Rank& rank = ranks_[r];
    const size_t position = rank.warps[warp].position;
    if (position == rank.pulls[warp].size()) {
      return;
    }
    const int32_t looks = rank.pulls[warp][position].looks;
    at(now_ + looks * machine_.look_s, What::kPull, r, warp);
  }

  void pull(int32_t r, int32_t w) {
    PullingWarp& warp = ranks_[r].warps[w];
    const Pull& pull = ranks_[r].pulls[w][warp.position];
    const double seconds = pull.count * moves_.token_bytes / machine_.pull_bytes_per_s;
    warp.end = now_ + std::max(seconds, machine_.pull_latency_s);
    warp.coming = pull.count;
    for (int32_t i = 0; i < pull.count; ++i) {
      ask({Purpose::kPulledToken, pull.tokens[i].home, r, w, moves_.token_bytes, now_});
    }
  }

  void take_tokens(int32_t r, int32_t warp) {
    Rank& rank = ranks_[r];
    const Pull& pull = rank.pulls[warp][rank.warps[warp].position++];
    for (int32_t i = 0; i < pull.count; ++i) {
      ++rank.pulled[pull.tokens[i].tile];
    }
    outcome_.tokens_s[r] = now_;
    rank.end = std::max(rank.end, now_);
    look(r, warp);
    if (see_tokens(r)) {
      start_waiting(r);
    }
  }

  // Tokens count as there with those of all earlier tiles.
  bool see_tokens(int32_t r) {
    Rank& rank = ranks_[r];
    const int32_t before = rank.tokens_there;
    while (rank.tokens_there < works_[r].tiles() &&
           rank.pulled[rank.tokens_there] == works_[r].tokens_of_tile[rank.tokens_there]) {
      ++rank.tokens_there;
    }
    return rank.tokens_there > before;
  }

  void claim(int32_t r, int32_t c) {
    Rank& rank = ranks_[r];
    if (rank.next_item < static_cast<int32_t>(works_[r].items.size())) {
      rank.clusters[c].next = rank.next_item++;
    }
  }

  void start_waiting(int32_t r) {
    for (int32_t c = 0; c < clusters_; ++c) {
      try_to_start(r, c);
    }
  }

  void try_to_start(int32_t r, int32_t c) {
    Cluster& cluster = ranks_[r].clusters[c];
    if (cluster.item != kNone || cluster.next == kNone) {
      return;
    }
    const WorkItem& item = works_[r].items[cluster.next];
    if (!may_start(r, item, &cluster.reason)) {
      return;
    }
    outcome_.waiting_s[r * kWaitings + cluster.reason] += (now_ - cluster.idle_since) / clusters_;
    cluster.item = cluster.next;
    cluster.next = kNone;
    claim(r, c);
    const BlockWork work = block_work(item, 0);
    const bool is_down = work.product == Product::kDown;
    const double steps = (is_down ? sizes_.inner : sizes_.hidden) / double{sm90::kBlockDepth};
    // The two warpgroups share a single tile.
    const double seconds = steps * machine_.step_s * work.tiles / sm90::kBlockTiles;
    outcome_.busy_s[r] += seconds + (is_down ? machine_.down_s : machine_.gate_up_s);
    at(now_ + seconds, What::kStepsDone, r, c);
  }

  // Whether any row of tiles [begin, end) of a rank is of another one.
  bool has_others_than(int32_t r, int32_t begin, int32_t end) const {
    const auto first = works_[r].homes.begin();
    return std::any_of(first + works_[r].first_homes[begin], first + works_[r].first_homes[end],
                       [&](const Homes& homes) { return homes.home != r; });
  }

  // As sm90/forward_schedule.cuh waits; what it waits for last is the reason.
  bool may_start(int32_t r, const WorkItem& item, Waiting* reason) const {
    const Rank& rank = ranks_[r];
    const sm90::WorkShape& shape = works_[r].shape;
    for (int32_t block = 0; block < shape.cluster; ++block) {
      const BlockWork work = block_work(item, block);
      const bool reads_received = has_others_than(r, work.tile, work.tile + work.tiles);
      for (int32_t tile = work.tile; tile < work.tile + work.tiles; ++tile) {
        if (work.product == Product::kDown) {
          if (rank.hidden_ready[tile] < shape.gate_up_columns) {
            *reason = kForHidden;
            return false;
          }
          continue;
        }
        const int32_t former = sm90::former_tile(tile, shape.ring_tiles);
        if (former >= 0 && rank.down_done[former] < shape.down_columns) {
          *reason = kForRing;
          return false;
        }
        if (reads_received && rank.tokens_there <= tile) {
          *reason = kForTokens;
          return false;
        }
      }
    }
    return true;
  }

  // Calls `of_tile(tile)` for every tile of which the item has a column block, block by block.
  template <typename OfTile>
  void each_tile(int32_t r, const WorkItem& item, const OfTile& of_tile) const {
    const sm90::WorkShape& shape = works_[r].shape;
    for (int32_t block = 0; block < shape.cluster; ++block) {
      const BlockWork work = block_work(item, block);
      if (work.column_block < shape.columns(work.product)) {
        for (int32_t tile = work.tile; tile < work.tile + work.tiles; ++tile) {
          of_tile(work, tile);
        }
      }
    }
  }

  void end_steps(int32_t r, int32_t c) {
    Rank& rank = ranks_[r];
    Cluster& cluster = rank.clusters[c];
    const WorkItem& item = works_[r].items[cluster.item];
    const bool is_down = item.flags & WorkItem::kDownFlag;
    cluster.items_end = now_ + (is_down ? machine_.down_s : machine_.gate_up_s);
    if (!is_down) {
      at(cluster.items_end, What::kItemDone, r, c);
      return;
    }
    bool is_read = false;  // some tile by all
    each_tile(r, item, [&](const BlockWork& work, int32_t tile) {
      is_read |= ++rank.down_done[tile] == works_[r].shape.down_columns;
      if (moves_.combine_push) {
        gather_pushes(r, work, tile);
      }
    });
    cluster.pushes = static_cast<int32_t>(homes_.size());
    for (const auto& [home, elements] : homes_) {
      send({Purpose::kPushedRows, r, home, c, elements * moves_.output_bytes, now_});
    }
    if (homes_.empty()) {
      at(cluster.items_end, What::kItemDone, r, c);
    }
    homes_.clear();
    if (is_read) {
      start_waiting(r);
    }
  }

  // Adds what a tile's rows of one column block send to their homes.
  void gather_pushes(int32_t r, const BlockWork& work, int32_t tile) {
    const RankWork& of_rank = works_[r];
    const int32_t columns =
        std::min(sm90::kBlockColumns, sizes_.hidden - work.column_block * sm90::kBlockColumns);
    for (int32_t i = of_rank.first_homes[tile]; i < of_rank.first_homes[tile + 1]; ++i) {
      const auto [home, rows] = of_rank.homes[i];
      if (home == r) {
        continue;
      }
      const auto same =
          std::ranges::find_if(homes_, [&](const auto& other) { return other.first == home; });
      const double elements = static_cast<double>(rows) * columns;
      if (same == homes_.end()) {
        homes_.emplace_back(home, elements);
      } else {
        same->second += elements;
      }
    }
  }

  void end_item(int32_t r, int32_t c) {
    Rank& rank = ranks_[r];
    Cluster& cluster = rank.clusters[c];
    const WorkItem& item = works_[r].items[cluster.item];
    bool is_ready = false;  // some tile's hidden rows
    if (!(item.flags & WorkItem::kDownFlag)) {
      each_tile(r, item, [&](const BlockWork&, int32_t tile) {
        is_ready |= ++rank.hidden_ready[tile] == works_[r].shape.gate_up_columns;
      });
    }
    cluster.item = kNone;
    cluster.idle_since = now_;
    rank.end = std::max(rank.end, now_);
    try_to_start(r, c);
    if (is_ready) {
      start_waiting(r);
    }
  }

  const Sizes& sizes_;
  const std::vector<RankWork>& works_;
  const Machine& machine_;
  const Moves& moves_;
  const double bin_s_;
  const int32_t count_;
  const int32_t clusters_;
  Links links_;
  std::vector<Rank> ranks_;
  Events events_;
  std::vector<Transfer> transfers_;
  std::vector<int32_t> free_;
  std::vector<std::pair<int32_t, double>> homes_;
  Outcome outcome_{};
  double origin_ = 0;  // of the phase
  double now_ = 0;     // in it
  double phase_end_ = 0;
};

}  // namespace

Outcome simulate(const Sizes& sizes, const std::vector<RankWork>& works, const Machine& machine,
                 const Moves& moves, double bin_s) {
  return Simulation(sizes, works, machine, moves, bin_s).run();
}

}  // namespace mok::rack
