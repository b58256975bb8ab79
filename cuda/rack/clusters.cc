#include "rack/clusters.h"

#include <algorithm>

namespace mok::rack {
namespace {

using sm90::BlockWork;
using sm90::Product;
using sm90::WorkItem;

constexpr int32_t kNone = -1;

bool is_down(const WorkItem& item) { return item.flags & WorkItem::kDownFlag; }

}  // namespace

Clusters::Clusters(const Sizes& sizes, const RankWork& work, const Machine& machine,
                   const Moves& moves, int32_t rank, const Puller& puller, Events* events,
                   Transfers* transfers)
    : sizes_(sizes),
      work_(work),
      machine_(machine),
      moves_(moves),
      rank_(rank),
      puller_(puller),
      events_(*events),
      transfers_(*transfers),
      hidden_ready_(work.tiles()),
      down_done_(work.tiles()) {
  for (int32_t i = 0; i < machine.sms / sm90::kCluster; ++i) {
    clusters_.push_back({.item = kNone, .next = claim()});  // the first items go one to a cluster
  }
  start_waiting();
}

int32_t Clusters::claim() {
  return next_item_ < static_cast<int32_t>(work_.items.size()) ? next_item_++ : kNone;
}

void Clusters::start_waiting() {
  for (Cluster& cluster : clusters_) {
    try_to_start(&cluster);
  }
}

void Clusters::try_to_start(Cluster* cluster) {
  if (cluster->item != kNone || cluster->next == kNone) {
    return;
  }
  const WorkItem& item = work_.items[cluster->next];
  if (!may_start(item, &cluster->reason)) {
    return;
  }
  const double now = events_.now();
  waiting_s_[cluster->reason] += (now - cluster->idle_since) / count();
  cluster->item = cluster->next;
  cluster->next = claim();
  const double steps = (is_down(item) ? sizes_.inner : sizes_.hidden) / double{sm90::kBlockDepth};
  // The two warpgroups share a single tile.
  const double seconds = steps * machine_.step_s * block_work(item, 0).tiles / sm90::kBlockTiles;
  busy_s_ += seconds + (is_down(item) ? machine_.down_s : machine_.gate_up_s);
  events_.add(now + seconds, What::kStepsDone, rank_,
              static_cast<int32_t>(cluster - clusters_.data()));
}

// As sm90/forward_schedule.cuh waits; what it waits for last is the reason.
bool Clusters::may_start(const WorkItem& item, Waiting* reason) const {
  for (int32_t block = 0; block < work_.shape.cluster; ++block) {
    const BlockWork work = block_work(item, block);
    const bool reads_received = has_others_than_own(work.tile, work.tile + work.tiles);
    for (int32_t tile = work.tile; tile < work.tile + work.tiles; ++tile) {
      if (work.product == Product::kDown) {
        if (hidden_ready_[tile] < work_.shape.gate_up_columns) {
          *reason = kForHidden;
          return false;
        }
        continue;
      }
      const int32_t former = sm90::former_tile(tile, work_.shape.ring_tiles);
      if (former >= 0 && down_done_[former] < work_.shape.down_columns) {
        *reason = kForRing;
        return false;
      }
      if (reads_received && puller_.tiles_there() <= tile) {
        *reason = kForTokens;
        return false;
      }
    }
  }
  return true;
}

// Whether any row of tiles [begin, end) has its home elsewhere.
bool Clusters::has_others_than_own(int32_t begin, int32_t end) const {
  const auto first = work_.homes.begin();
  return std::any_of(first + work_.first_homes[begin], first + work_.first_homes[end],
                     [&](const Homes& homes) { return homes.home != rank_; });
}

// Calls `of_tile(work, tile)` for every tile of which the item has a column block, block by block.
template <typename OfTile>
void Clusters::each_tile(const WorkItem& item, const OfTile& of_tile) const {
  for (int32_t block = 0; block < work_.shape.cluster; ++block) {
    const BlockWork work = block_work(item, block);
    if (work.column_block < work_.shape.columns(work.product)) {
      for (int32_t tile = work.tile; tile < work.tile + work.tiles; ++tile) {
        of_tile(work, tile);
      }
    }
  }
}

void Clusters::end_steps(int32_t c) {
  Cluster& cluster = clusters_[c];
  const WorkItem& item = work_.items[cluster.item];
  const double now = events_.now();
  cluster.items_end = now + (is_down(item) ? machine_.down_s : machine_.gate_up_s);
  if (!is_down(item)) {
    events_.add(cluster.items_end, What::kItemDone, rank_, c);
    return;
  }
  bool is_read = false;  // some tile by all
  each_tile(item, [&](const BlockWork& work, int32_t tile) {
    is_read |= ++down_done_[tile] == work_.shape.down_columns;
    if (moves_.combine_push) {
      gather_pushes(work, tile);
    }
  });
  cluster.pushes = static_cast<int32_t>(homes_.size());
  for (const auto& [home, elements] : homes_) {
    transfers_.send({Purpose::kPushedRows, rank_, home, c, elements * moves_.output_bytes, now});
  }
  if (homes_.empty()) {
    events_.add(cluster.items_end, What::kItemDone, rank_, c);
  }
  homes_.clear();
  if (is_read) {
    start_waiting();
  }
}

// Adds what a tile's rows of one column block send to their homes.
void Clusters::gather_pushes(const BlockWork& work, int32_t tile) {
  const int32_t columns =
      std::min(sm90::kBlockColumns, sizes_.hidden - work.column_block * sm90::kBlockColumns);
  for (int32_t i = work_.first_homes[tile]; i < work_.first_homes[tile + 1]; ++i) {
    const auto [home, rows] = work_.homes[i];
    if (home == rank_) {
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

void Clusters::arrive(int32_t c, double done) {
  Cluster& cluster = clusters_[c];
  end_ = std::max(end_, done + machine_.signal_s);
  if (done > cluster.items_end) {
    waiting_s_[kForLink] += (done - cluster.items_end) / count();
    cluster.items_end = done;
  }
  if (--cluster.pushes == 0) {
    events_.add(cluster.items_end, What::kItemDone, rank_, c);
  }
}

void Clusters::end_item(int32_t c) {
  Cluster& cluster = clusters_[c];
  const WorkItem& item = work_.items[cluster.item];
  bool is_ready = false;  // some tile's hidden rows
  if (!is_down(item)) {
    each_tile(item, [&](const BlockWork&, int32_t tile) {
      is_ready |= ++hidden_ready_[tile] == work_.shape.gate_up_columns;
    });
  }
  cluster.item = kNone;
  cluster.idle_since = events_.now();
  end_ = std::max(end_, events_.now());
  try_to_start(&cluster);
  if (is_ready) {
    start_waiting();
  }
}

bool Clusters::are_done() const {
  return std::ranges::all_of(clusters_, [](const Cluster& cluster) {
    return cluster.item == kNone && cluster.next == kNone;
  });
}

}  // namespace mok::rack
