// Every order in which ranks can agree outside a call, several times: at an exit all go on, or
// none, and nobody goes on to whose agreement a rank has not come. Waits may expire whenever
// somebody has not come, flags may be lost, ranks may have problems of their own, and may leave
// agreements out. With a part of the protocol left out there has to be an order that is wrong.
#include "core/agreement.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "every_order.h"

namespace {

constexpr int kMostRanks = 3;
constexpr int kMostEpochs = 32;

enum class Bug {
  kNone,
  kDecidesAlone,   // without the word that all share
  kForgetsLast,    // the word has the last decision alone
  kHidesProblems,  // a rank with a problem does not show it when it comes
};

struct Settings {
  int ranks;
  int tries;  // of each rank
  int lost_flags = 0;
  Bug bug = Bug::kNone;
};

// Most phases have a step for each peer.
enum Phase : uint8_t { kIdle, kFind, kShow, kWait, kLook, kShowFailure, kDecide };
enum Outcome : uint8_t { kUnknown, kStops, kGoesOn };

struct Rank {
  Phase phase;
  uint8_t peer;
  uint8_t tries;
  uint8_t entry, epoch, failed;
  uint8_t has_own_problem;
  uint8_t has_problem;  // of its own, or with the others
  uint8_t is_together;  // all came wherever it has waited
  Outcome outcomes[kMostEpochs];
};

struct Shown {
  uint8_t epoch, failed;
};

class Agreements {
 public:
  struct World {
    uint64_t word;
    Rank ranks[kMostRanks];
    Shown shown[kMostRanks][kMostRanks];  // to the first by the second
    uint8_t lost_flags;
    uint8_t are_split;
    uint8_t goes_on_with_problem;
  };
  static_assert(std::has_unique_object_representations_v<World>);

  struct Step {
    uint8_t rank, peer;
    Phase phase;
    bool goes_wrong;  // a problem of the rank's own, a lost flag, a wait that expires
  };

  explicit Agreements(const Settings& settings) : settings_(settings) {}

  World first() const {
    World world;
    std::memset(&world, 0, sizeof(world));
    return world;
  }

  std::vector<Step> able(const World& world) const {
    std::vector<Step> steps;
    for (int r = 0; r < settings_.ranks; ++r) {
      const Rank& me = world.ranks[r];
      for (const bool goes_wrong : {false, true}) {
        if (can(world, r, goes_wrong)) {
          steps.push_back({static_cast<uint8_t>(r), me.peer, me.phase, goes_wrong});
        }
      }
    }
    return steps;
  }

  void take(World& world, const Step& step) const {
    Rank& me = world.ranks[step.rank];
    const Shown& seen = world.shown[step.rank][me.peer];
    switch (me.phase) {
      case kIdle:
        ++me.tries;
        me.has_own_problem = me.has_problem = step.goes_wrong;
        me.is_together = 1;
        me.entry = 0;
        enter(me, kFind);
        break;
      case kFind: {
        const uint64_t entry = mok::next_agreement(me.epoch, {{seen.epoch, seen.failed, 0}});
        me.entry = static_cast<uint8_t>(std::max<uint64_t>(me.entry, entry));
        if (is_last_peer(me)) {
          come(me, me.entry);
        }
        break;
      }
      case kShow:
      case kShowFailure:
        if (step.goes_wrong) {
          ++world.lost_flags;
        } else {
          world.shown[me.peer][step.rank] = {me.epoch, me.failed};
        }
        if (is_last_peer(me)) {
          enter(me, me.phase == kShowFailure ? kDecide : me.is_together != 0 ? kWait : kLook);
        }
        break;
      case kWait:
        me.is_together = !step.goes_wrong;
        enter(me, kLook);
        break;
      case kLook:
        if (seen.epoch < me.epoch || mok::has_failed_since(seen.failed, me.entry)) {
          me.has_problem = 1;
        }
        if (is_last_peer(me)) {
          if (me.epoch == me.entry) {
            come(me, me.entry + 1);
          } else {
            me.failed = me.has_problem != 0 ? me.epoch : me.failed;
            enter(me, me.has_problem != 0 ? kShowFailure : kDecide);
          }
        }
        break;
      case kDecide:
        settle(world, step.rank);
        enter(me, kIdle);
        break;
    }
  }

  bool is_end(const World&) const { return true; }

  std::string complaint(const World& world) const {
    return world.are_split != 0              ? "not all go on that meet"
           : world.goes_on_with_problem != 0 ? "a rank goes on that cannot"
                                             : "";
  }

  std::string code(const World& world) const {
    return {reinterpret_cast<const char*>(&world), sizeof(world)};
  }

  std::string describe(const Step& step) const {
    constexpr const char* kNames[] = {"begins",   "finds the entry by", "shows",  "waits",
                                      "looks at", "shows failure to",   "decides"};
    return "rank " + std::to_string(step.rank) + " " + kNames[step.phase] + " " +
           std::to_string(step.peer) + (step.goes_wrong ? ", in vain" : "");
  }

 private:
  bool can(const World& world, int r, bool goes_wrong) const {
    const Rank& me = world.ranks[r];
    switch (me.phase) {
      case kIdle:
        return me.tries < settings_.tries;
      case kShow:
      case kShowFailure:
        return !goes_wrong || (world.lost_flags < settings_.lost_flags && me.peer != r);
      case kWait: {
        const bool have_come =
            std::all_of(world.shown[r], world.shown[r] + settings_.ranks,
                        [&](const Shown& seen) { return seen.epoch >= me.epoch; });
        return have_come != goes_wrong;
      }
      default:
        return !goes_wrong;
    }
  }

  bool is_last_peer(Rank& me) const {
    me.peer = static_cast<uint8_t>((me.peer + 1) % settings_.ranks);
    return me.peer == 0;
  }

  static void enter(Rank& me, Phase phase) {
    me.phase = phase;
    me.peer = 0;
  }

  void come(Rank& me, int epoch) const {
    me.epoch = static_cast<uint8_t>(epoch);
    if (me.has_problem != 0 && settings_.bug != Bug::kHidesProblems) {
      me.failed = me.epoch;
    }
    enter(me, kShow);
  }

  void settle(World& world, int r) const {
    Rank& me = world.ranks[r];
    const uint32_t exit = me.epoch;
    bool goes_on = me.has_problem == 0;
    if (settings_.bug != Bug::kDecidesAlone) {
      const uint64_t before =
          settings_.bug == Bug::kForgetsLast ? world.word >> 32 << 32 : world.word;
      if (before >> 32 < exit) {
        world.word = mok::decide(before, exit, goes_on);
      }
      goes_on = mok::all_go_on_at(world.word, exit);
    }
    me.outcomes[exit] = goes_on ? kGoesOn : kStops;
    if (goes_on && me.has_own_problem != 0) {
      world.goes_on_with_problem = 1;
    }
    for (int peer = 0; peer < settings_.ranks; ++peer) {
      const Rank& other = world.ranks[peer];
      const Outcome theirs = other.outcomes[exit];
      const bool has_left_out = theirs == kUnknown && other.epoch > exit;
      if ((theirs != kUnknown && theirs != me.outcomes[exit]) ||
          (goes_on && (other.epoch < exit || has_left_out))) {
        world.are_split = 1;
      }
    }
  }

  Settings settings_;
};

void expect(bool wrong, const std::string& name, const Settings& settings) {
  every_order::expect(wrong, name, Agreements(settings));
}

}  // namespace

int main() {
  expect(false, "two ranks", {2, 3});
  expect(false, "two ranks, a lost flag", {2, 2, 1});
  expect(false, "three ranks", {3, 1});
  expect(true, "each decides alone", {2, 1, 0, Bug::kDecidesAlone});
  expect(true, "a word of the last decision", {2, 2, 0, Bug::kForgetsLast});
  expect(true, "hidden problems", {2, 1, 0, Bug::kHidesProblems});
  std::mt19937 rng(0);
  for (int walk = 0; walk < 3000; ++walk) {
    if (!every_order::walk(Agreements({3, 4, 2}), rng).empty()) {
      std::printf("three ranks, random order %d\n", walk);
      return 1;
    }
  }
}
