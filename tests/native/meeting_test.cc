// Every interleaving of a few calls of ranks that meet as the barrier kernel does, with waits that
// may expire whenever a peer is not there and kernels that may give up: a call that succeeds on a
// rank has read the tokens of that call of all ranks, and taken the rows of that call of all.
// With any of the protocol's steps left out the checker has to find a call for which this is wrong.
#include "core/meeting.h"

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

using namespace mok;

namespace {

constexpr int kMostRanks = 3;

// Who moves tokens, and rows back.
enum class Moves {
  kPullTokensPushRows,  // in the call
  kPushTokensPullRows,  // before it, and after it
};

enum class Bug {
  kNone,
  kPushesUnmet,     // rows are made by a rank that has not passed the entry
  kHidesFailure,    // a rank that has failed does not show it
  kIgnoresFailure,  // failures that others show are not looked at
  kSkipsEpochs,     // barriers are counted as they come, and who has failed leaves the exit out
  kLeavesNoExit,    // rows are read without a second meeting
  kShowsLate,       // a failed rank shows that it has come before it shows that it has failed
};

// Where a rank is in its call. A step that concerns every peer is one for each of them.
enum Step : uint8_t {
  kPublish,
  kEntryShow,
  kEntryWait,
  kEntryLook,
  kEntryFail,
  kRead,
  kPush,
  kExitFail,
  kExitShow,
  kExitFailLate,
  kExitWait,
  kExitLook,
  kExitGiveUp,
  kTake,
  kFinish,
};

struct Rank {
  uint8_t call, step, peer, met;  // `met`: has failed nowhere in this call
  uint8_t epoch;
  uint8_t saw[kMostRanks];   // the tokens read of each peer, by their call
  uint8_t took[kMostRanks];  // likewise the rows
};

struct World {
  Rank ranks[kMostRanks];
  uint8_t x[kMostRanks][kMostRanks];     // tokens that lie on a rank, of each, by their call
  uint8_t rows[kMostRanks][kMostRanks];  // likewise rows
  struct Shown {
    uint8_t epoch, failed;
  } flags[kMostRanks][kMostRanks];  // shown to a rank by each
};

class Checker {
 public:
  Checker(Moves moves, int ranks, int calls, Bug bug)
      : pulls_tokens_(moves == Moves::kPullTokensPushRows),
        pulls_rows_(moves == Moves::kPushTokensPullRows),
        ranks_(ranks),
        calls_(calls),
        bug_(bug) {}

  // Whether some interleaving ends a call with wrong results.
  bool finds_a_wrong_call() {
    World first;
    std::memset(&first, 0, sizeof(first));
    for (int r = 0; r < ranks_; ++r) {
      begin_call(first.ranks[r], 1);
    }
    std::vector<World> open{first};
    while (!open.empty() && !wrong_) {
      const World world = open.back();
      open.pop_back();
      if (!seen_.emplace(reinterpret_cast<const char*>(&world), sizeof(world)).second) {
        continue;
      }
      for (int r = 0; r < ranks_; ++r) {
        if (world.ranks[r].call <= calls_) {
          advance(world, r, open);
        }
      }
    }
    return wrong_;
  }

  size_t worlds() const { return seen_.size(); }

 private:
  static void begin_call(Rank& rank, int call) {
    rank.call = static_cast<uint8_t>(call);
    rank.step = kPublish;
    rank.peer = 0;
    rank.met = 1;
    std::memset(rank.saw, 0, sizeof(rank.saw));
    std::memset(rank.took, 0, sizeof(rank.took));
  }

  uint64_t epoch_of(const Rank& rank, Meeting meeting) const {
    return bug_ == Bug::kSkipsEpochs ? rank.epoch + 1u : next_epoch(meeting, rank.epoch);
  }

  // Does a step for the peer at hand and goes to the next one, in the end to step `then`.
  template <typename Do>
  void for_each_peer(World& world, int r, Step then, const Do& act) {
    Rank& me = world.ranks[r];
    act(me.peer);
    if (++me.peer == ranks_) {
      me.peer = 0;
      me.step = then;
    }
  }

  void show(World& world, int r, int peer, uint8_t World::Shown::* word, uint64_t value) {
    world.flags[peer][r].*word = static_cast<uint8_t>(value);
  }

  bool all_have_come(const World& world, int r, uint64_t now) const {
    for (int p = 0; p < ranks_; ++p) {
      if (world.flags[r][p].epoch < now) {
        return false;
      }
    }
    return true;
  }

  bool someone_has_failed(const World& world, int r, uint64_t now) const {
    for (int p = 0; p < ranks_ && bug_ != Bug::kIgnoresFailure; ++p) {
      if (has_failed_since(world.flags[r][p].failed, entry_of(now))) {
        return true;
      }
    }
    return false;
  }

  // All worlds in which rank r has done its next step.
  void advance(World world, int r, std::vector<World>& open) {
    Rank& me = world.ranks[r];
    switch (static_cast<Step>(me.step)) {
      case kPublish:
        for_each_peer(world, r, kEntryShow,
                      [&](int p) { world.x[pulls_tokens_ ? r : p][r] = me.call; });
        if (me.step == kEntryShow) {
          me.epoch = static_cast<uint8_t>(epoch_of(me, Meeting::kEntry));
        }
        break;
      case kEntryShow:
        for_each_peer(world, r, kEntryWait,
                      [&](int p) { show(world, r, p, &World::Shown::epoch, me.epoch); });
        break;
      case kEntryWait:
        if (all_have_come(world, r, me.epoch)) {
          me.step = kEntryLook;
        } else {  // one that waits in vain
          World late = world;
          late.ranks[r].met = 0;
          late.ranks[r].step = kEntryFail;
          open.push_back(late);
          return;
        }
        break;
      case kEntryLook:
        me.met = someone_has_failed(world, r, me.epoch) ? 0 : 1;
        me.step = me.met ? kRead : kEntryFail;
        break;
      case kEntryFail:
        for_each_peer(world, r, bug_ == Bug::kPushesUnmet ? kRead : kExitFail, [&](int p) {
          if (bug_ != Bug::kHidesFailure) {
            show(world, r, p, &World::Shown::failed, me.epoch);
          }
        });
        break;
      case kRead:
        for_each_peer(world, r, kPush,
                      [&](int p) { me.saw[p] = world.x[pulls_tokens_ ? p : r][p]; });
        break;
      case kPush:
        if (me.peer == 0 && me.met) {  // or its kernel gives up
          World failed = world;
          failed.ranks[r].met = 0;
          failed.ranks[r].step = kExitFail;
          open.push_back(failed);
        }
        for_each_peer(world, r, kExitFail,
                      [&](int p) { world.rows[pulls_rows_ ? r : p][r] = me.call; });
        break;
      case kExitFail: {
        if (bug_ == Bug::kLeavesNoExit || (bug_ == Bug::kSkipsEpochs && !me.met)) {
          me.step = me.met ? kTake : kFinish;
          break;
        }
        if (me.peer == 0) {
          me.epoch = static_cast<uint8_t>(epoch_of(me, Meeting::kExit));
        }
        const bool shows = !me.met && bug_ != Bug::kHidesFailure && bug_ != Bug::kShowsLate;
        for_each_peer(world, r, kExitShow, [&](int p) {
          if (shows) {
            show(world, r, p, &World::Shown::failed, me.epoch);
          }
        });
        break;
      }
      case kExitShow: {
        const Step then = me.met ? kExitWait : bug_ == Bug::kShowsLate ? kExitFailLate : kFinish;
        for_each_peer(world, r, then,
                      [&](int p) { show(world, r, p, &World::Shown::epoch, me.epoch); });
        break;
      }
      case kExitFailLate:
        for_each_peer(world, r, kFinish,
                      [&](int p) { show(world, r, p, &World::Shown::failed, me.epoch); });
        break;
      case kExitWait:
        if (all_have_come(world, r, me.epoch)) {
          me.step = kExitLook;
        } else {
          World late = world;
          late.ranks[r].met = 0;
          late.ranks[r].step = kExitGiveUp;
          open.push_back(late);
          return;
        }
        break;
      case kExitLook:
        me.met = someone_has_failed(world, r, me.epoch) ? 0 : 1;
        me.step = me.met ? kTake : kExitGiveUp;
        break;
      case kExitGiveUp:
        for_each_peer(world, r, kFinish, [&](int p) {
          if (bug_ != Bug::kHidesFailure) {
            show(world, r, p, &World::Shown::failed, me.epoch);
          }
        });
        break;
      case kTake:
        for_each_peer(world, r, kFinish,
                      [&](int p) { me.took[p] = world.rows[pulls_rows_ ? p : r][p]; });
        break;
      case kFinish:
        for (int p = 0; p < ranks_ && me.met; ++p) {
          wrong_ |= me.saw[p] != me.call || me.took[p] != me.call;
        }
        begin_call(me, me.call + 1);
        break;
    }
    open.push_back(world);
  }

  const bool pulls_tokens_, pulls_rows_;
  const int ranks_, calls_;
  const Bug bug_;
  bool wrong_ = false;
  std::unordered_set<std::string> seen_;
};

void expect(bool wrong, Moves moves, int ranks, int calls, Bug bug) {
  Checker checker(moves, ranks, calls, bug);
  const bool found = checker.finds_a_wrong_call();
  std::printf("moves %d, bug %d, %d ranks, %d calls: %zu worlds, %s\n", static_cast<int>(moves),
              static_cast<int>(bug), ranks, calls, checker.worlds(),
              found ? "a wrong call" : "all calls right");
  if (found != wrong) {
    std::exit(1);
  }
}

}  // namespace

int main() {
  for (const Moves moves : {Moves::kPullTokensPushRows, Moves::kPushTokensPullRows}) {
    expect(false, moves, 2, 4, Bug::kNone);
    expect(false, moves, 3, 2, Bug::kNone);
    for (const Bug bug : {Bug::kPushesUnmet, Bug::kHidesFailure, Bug::kIgnoresFailure,
                          Bug::kSkipsEpochs, Bug::kLeavesNoExit, Bug::kShowsLate}) {
      expect(true, moves, 2, 3, bug);
    }
  }
  std::puts("meetings good");
}
