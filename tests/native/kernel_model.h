#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "sm90/tile.h"

// The clusters of a persistent kernel, which claim the items of a list in order and do each at any
// speed: what its blocks wait for, read, write and tell is a job of theirs. Whatever is read has to
// be what the list's author meant. A model for every_order.h.
namespace kernel_model {

struct Count {
  int counter;
  int target;
};

struct Content {
  int place;
  int value;
};

// A block's share of an item. Between its begin and its end others may do anything, so it reads
// both times. It writes when it begins; if it reads too, when it ends, since the one may depend on
// the other.
struct Job {
  std::vector<Count> awaits;
  std::vector<Content> reads, writes;
  std::vector<int> tells;  // counters
};

// A kernel's work: items of a job for each block, and those who fetch tokens, who wait for nobody.
struct Work {
  int blocks = 1;  // of a cluster
  std::vector<std::vector<Job>> items;
  std::vector<std::vector<Job>> fetchers;  // jobs of each, in order
  std::vector<uint16_t> counters;          // at the begin
  int places = 0;
  std::vector<Content> contents;  // at the begin, of places that do not hold nothing
};

constexpr int kMostBlocks = mok::sm90::kCluster;
constexpr int kMostClaims = 3;  // one that is multiplied, and the assignments under way

class Kernel {
 public:
  // Claims of a cluster, the oldest first, and how many of them each block has begun and ended.
  struct Cluster {
    uint16_t claims[kMostClaims];
    uint16_t count;
    uint16_t begun[kMostBlocks];
    uint16_t ended[kMostBlocks];
    auto operator<=>(const Cluster&) const = default;
  };
  static_assert(std::has_unique_object_representations_v<Cluster>);

  struct World {
    std::vector<Cluster> clusters;
    std::vector<uint16_t> counters, places, fetched;
    uint16_t next_item = 0;
    bool is_wrong = false;
  };

  enum class Action : uint8_t { kClaim, kBegin, kEnd, kFetch };

  struct Step {
    Action action;
    uint8_t who, block;
    uint16_t item;
  };

  Kernel(Work work, int clusters) : work_(std::move(work)), clusters_(clusters) {}

  World first() const {
    World world;
    world.clusters.resize(clusters_);
    world.counters = work_.counters;
    world.places.assign(work_.places, kNothing);
    for (const auto& [place, value] : work_.contents) {
      world.places[place] = static_cast<uint16_t>(value);
    }
    world.fetched.resize(work_.fetchers.size());
    return world;
  }

  std::vector<Step> able(const World& world) const {
    std::vector<Step> steps;
    for (uint8_t c = 0; c < clusters_; ++c) {
      const Cluster& cluster = world.clusters[c];
      // The first block claims, when its scheduling warp has nothing to wait for.
      if (world.next_item < work_.items.size() && cluster.count < kMostClaims &&
          cluster.begun[0] == cluster.count) {
        steps.push_back({Action::kClaim, c, 0, world.next_item});
      }
      for (uint8_t b = 0; b < work_.blocks; ++b) {
        const int begun = cluster.begun[b], ended = cluster.ended[b];
        if (begun < cluster.count && may_begin(world, job(cluster.claims[begun], b))) {
          steps.push_back({Action::kBegin, c, b, cluster.claims[begun]});
        }
        if (ended < begun) {
          steps.push_back({Action::kEnd, c, b, cluster.claims[ended]});
        }
      }
    }
    for (uint8_t f = 0; f < work_.fetchers.size(); ++f) {
      if (world.fetched[f] < work_.fetchers[f].size()) {
        steps.push_back({Action::kFetch, f, 0, world.fetched[f]});
      }
    }
    return steps;
  }

  void take(World& world, const Step& step) const {
    if (step.action == Action::kFetch) {
      const Job& fetch = work_.fetchers[step.who][world.fetched[step.who]++];
      write(world, fetch);
      tell(world, fetch);
      return;
    }
    Cluster& cluster = world.clusters[step.who];
    if (step.action == Action::kClaim) {
      cluster.claims[cluster.count++] = world.next_item++;
      return;
    }
    const Job& mine = job(step.item, step.block);
    read(world, mine);
    const bool begins = step.action == Action::kBegin;
    ++(begins ? cluster.begun : cluster.ended)[step.block];
    if (begins == mine.reads.empty()) {
      write(world, mine);
    }
    if (!begins) {
      tell(world, mine);
      drop_claim(cluster);
    }
  }

  bool is_end(const World& world) const {
    return world.next_item == work_.items.size() &&
           std::ranges::all_of(world.clusters, [](const Cluster& c) { return c.count == 0; });
  }

  std::string complaint(const World& world) const {
    return world.is_wrong ? "somebody reads what is not there" : "";
  }

  // Clusters are alike, so it does not matter which is which.
  std::string code(const World& world) const {
    std::vector<Cluster> clusters = world.clusters;
    std::ranges::sort(clusters);
    std::string code;
    const auto add = [&](const auto& values) {
      code.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
    };
    add(clusters);
    add(world.counters);
    add(world.places);
    add(world.fetched);
    return code + (world.is_wrong ? "!" : "");
  }

  std::string describe(const Step& step) const {
    const std::string who = std::to_string(step.who);
    const std::string item = std::to_string(step.item);
    if (step.action == Action::kFetch) {
      return "fetcher " + who + " fetches its token " + item;
    }
    if (step.action == Action::kClaim) {
      return "cluster " + who + " claims item " + item;
    }
    return "block " + std::to_string(step.block) + " of cluster " + who +
           (step.action == Action::kBegin ? " begins item " : " ends item ") + item;
  }

 private:
  static constexpr uint16_t kNothing = 0xffff;

  const Job& job(int item, int block) const { return work_.items[item][block]; }

  static bool may_begin(const World& world, const Job& job) {
    return std::ranges::all_of(job.awaits, [&](const Count& await) {
      return world.counters[await.counter] >= await.target;
    });
  }
  static void read(World& world, const Job& job) {
    for (const auto& [place, value] : job.reads) {
      world.is_wrong |= world.places[place] != value;
    }
  }
  static void write(World& world, const Job& job) {
    for (const auto& [place, value] : job.writes) {
      world.places[place] = static_cast<uint16_t>(value);
    }
  }
  static void tell(World& world, const Job& job) {
    for (const int counter : job.tells) {
      ++world.counters[counter];
    }
  }

  // The oldest claim, once all blocks are done with it.
  void drop_claim(Cluster& cluster) const {
    if (std::all_of(cluster.ended, cluster.ended + work_.blocks, [](int n) { return n > 0; })) {
      std::shift_left(cluster.claims, cluster.claims + kMostClaims, 1);
      cluster.claims[--cluster.count] = 0;
      for (int b = 0; b < work_.blocks; ++b) {
        --cluster.begun[b];
        --cluster.ended[b];
      }
    }
  }

  const Work work_;
  const int clusters_;
};

}  // namespace kernel_model
