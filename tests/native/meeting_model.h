#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "core/meeting.h"

// Ranks that call and meet as the kernels do (link/meet.cuh), one access to a peer's
// memory at a time, with waits that may expire whenever somebody has not come, who may come back at
// any time, and kernels that may give up. A model for every_order.h.
namespace meeting_model {

constexpr int kMostRanks = 3;

// Who moves tokens, and rows back.
enum class Moves {
  kPullTokensPushRows,  // in the call
  kPushTokensPullRows,  // before it, and after it
};

enum class Bug {
  kNone,
  kAwaitsNoEntry,
  kAwaitsNoExit,
  kLeavesNoExit,    // rows are read without a second meeting
  kTakesOldFlags,   // who has come to any barrier has come to this one
  kCountsBarriers,  // epochs count the barriers that a rank has come to, not those there were
  kPushesUnmet,     // rows are made by a rank that has not passed the entry
  kHidesFailure,    // a rank that has failed does not show it
  kIgnoresFailure,  // failures that others show are not looked at
  kShowsLate,       // a failed rank shows that it has come before it shows that it has failed
  kComparesNoCalls,
  kComparesLate,     // calls are compared after the look for failures
  kComparesAnyCall,  // also with a call that the peer has gone on to
};

struct Settings {
  Moves moves;
  int ranks;
  int calls;
  Bug bug = Bug::kNone;
  // Who has not passed the entry goes on to the next call. In the kernel it comes to the exit too,
  // and shows once more that it has failed; epochs are made so that it need not.
  bool failed_leave_exit_out = false;
  int different_call = 0;  // the one, if any, in which rank 1 makes another call than the others
};

// Where a rank is in its call. Most phases have a step for each peer.
enum Phase : uint8_t {
  kPublish,
  kEntryShow,
  kEntryWait,
  kEntryCompare,
  kEntryLook,
  kEntryCompareLate,
  kEntryFail,
  kRead,
  kMakeRows,
  kExitFail,
  kExitShow,
  kExitFailLate,
  kExitWait,
  kExitLook,
  kExitGiveUp,
  kTake,
};

struct Rank {
  uint8_t call;
  Phase phase;
  uint8_t peer;              // whose turn it is
  uint8_t met;               // 0 once something has failed in this call
  uint8_t epoch;             // of the last barrier to which it has come
  uint8_t saw[kMostRanks];   // of which calls the tokens were that it read, by peer
  uint8_t took[kMostRanks];  // likewise the rows
};

// What a rank has from one of its peers, written by that one.
struct Place {
  uint8_t epoch, failed;  // the peer's Flag,
  uint8_t call;           // with a small number for a signature
  uint8_t failed_call;    // the last call in which it has shown that it failed
  uint8_t tokens, rows;   // of which calls they are
};

class Meetings {
 public:
  struct World {
    Rank ranks[kMostRanks];
    Place places[kMostRanks][kMostRanks];
    uint8_t is_misread;     // what a flag says about this call is not what its rank has shown
    uint8_t is_mixed;       // ranks that make different calls have passed the entry
    uint8_t is_wrong_call;  // one that succeeds has results of others
    uint8_t is_accused;     // a rank is said to make another call where it makes the same
  };
  static_assert(std::has_unique_object_representations_v<World>);

  struct Step {
    uint8_t rank, peer;
    Phase phase;
    bool gives_up;
  };

  explicit Meetings(const Settings& settings) : settings_(settings) {}

  World first() const {
    World world;
    std::memset(&world, 0, sizeof(world));
    for (int r = 0; r < settings_.ranks; ++r) {
      begin_call(world, r, 1);
    }
    return world;
  }

  std::vector<Step> able(const World& world) const {
    std::vector<Step> steps;
    for (int r = 0; r < settings_.ranks; ++r) {
      const Rank& me = world.ranks[r];
      const bool waits = me.phase == kEntryWait || me.phase == kExitWait;
      const bool may_give_up =
          waits ? !all_have_come(world, r) : me.phase == kMakeRows && me.met != 0;
      for (const bool gives_up : {false, true}) {
        const bool can = gives_up ? may_give_up : !waits || !may_give_up;
        if (me.call <= settings_.calls && can) {
          steps.push_back({static_cast<uint8_t>(r), me.peer, me.phase, gives_up});
        }
      }
    }
    return steps;
  }

  void take(World& world, const Step& step) const {
    const int r = step.rank;
    Rank& me = world.ranks[r];
    Place& mine = world.places[r][me.peer];    // from the peer
    Place& theirs = world.places[me.peer][r];  // for it
    if (step.gives_up) {
      fail(me);
      step.phase == kMakeRows ? come_to_exit(me, r)
                              : go(me, r, step.phase == kEntryWait ? kEntryFail : kExitGiveUp);
      return;
    }
    switch (step.phase) {
      case kPublish:
        for (int p = 0; p < settings_.ranks; ++p) {
          world.places[p][r].call = p == r ? 0 : static_cast<uint8_t>(signature(r, me));
        }
        write(world, r, &Place::tokens, settings_.moves == Moves::kPushTokensPullRows);
        if (me.phase != kPublish) {
          me.epoch = epoch_of(mok::Meeting::kEntry, me);
        }
        break;
      case kEntryShow:
      case kExitShow:
        theirs.epoch = me.epoch;
        next_peer(me, r);
        break;
      case kEntryWait:
        go_on(me, r);
        break;
      case kEntryCompare:
      case kEntryCompareLate:
        if (is_other_call(mine.call, r, me)) {
          world.is_accused |= me.call != settings_.different_call;
          fail(me);
        }
        next_peer(me, r);
        break;
      case kExitWait:
        go(me, r, kExitLook);
        break;
      case kEntryLook:
      case kExitLook:
        look(world, me, mine);
        next_peer(me, r);
        break;
      case kEntryFail:
      case kExitFail:
      case kExitFailLate:
      case kExitGiveUp:
        if (settings_.bug != Bug::kHidesFailure) {
          theirs.failed = me.epoch;
          theirs.failed_call = me.call;
        }
        next_peer(me, r);
        break;
      case kRead:
        world.is_mixed |= me.met && me.call == settings_.different_call;
        me.saw[me.peer] = mine.tokens;
        next_peer(me, r);
        break;
      case kMakeRows:
        write(world, r, &Place::rows, settings_.moves == Moves::kPullTokensPushRows);
        break;
      case kTake:
        me.took[me.peer] = mine.rows;
        next_peer(me, r);
        break;
    }
    if (me.phase == kPublish && step.phase != kPublish) {
      finish(world, r);
    }
  }

  bool is_end(const World&) const { return true; }  // whoever waits can give up

  std::string complaint(const World& world) const {
    return world.is_misread      ? "a flag is misread"
           : world.is_mixed      ? "different calls meet"
           : world.is_wrong_call ? "a call succeeds with results of another"
           : world.is_accused    ? "a rank is taken to make another call, and makes the same"
                                 : "";
  }

  std::string code(const World& world) const {
    return {reinterpret_cast<const char*>(&world), sizeof(world)};
  }

  std::string describe(const Step& step) const {
    static constexpr const char* kWhat[] = {
        "publishes its tokens",
        "comes to the entry",
        "finds all at the entry",
        "looks whether somebody makes another call",
        "looks whether somebody has failed",
        "looks late whether somebody makes another call",
        "shows that it has failed",
        "reads tokens",
        "makes rows",
        "shows before the exit that it has failed",
        "comes to the exit",
        "shows after the exit that it has failed",
        "finds all at the exit",
        "looks whether somebody has failed",
        "shows that it has failed",
        "takes rows",
    };
    const std::string who = "rank " + std::to_string(step.rank) + " ";
    if (step.gives_up) {
      return who + "gives up " +
             (step.phase == kEntryWait  ? "at the entry"
              : step.phase == kExitWait ? "at the exit"
                                        : "in its kernel");
    }
    return who + kWhat[step.phase] + ", peer " + std::to_string(step.peer);
  }

 private:
  int first_peer(int r) const { return r == 0 ? 1 : 0; }

  bool compares() const { return settings_.bug != Bug::kComparesNoCalls; }
  // Every call has a signature of its own.
  uint64_t signature(int r, const Rank& me) const {
    return 2u * me.call + (r == 1 && me.call == settings_.different_call);
  }
  bool is_other_call(uint8_t seen, int r, const Rank& me) const {
    const auto shown = [](uint64_t signature) {
      // A call's first barrier is its entry.
      return mok::call_at(signature, 2 * (signature / 2) - 1);
    };
    return settings_.bug == Bug::kComparesAnyCall
               ? seen != signature(r, me)
               : mok::is_other_call(shown(seen), shown(signature(r, me)));
  }

  uint8_t epoch_of(mok::Meeting meeting, const Rank& me) const {
    return static_cast<uint8_t>(
        settings_.bug == Bug::kCountsBarriers ? me.epoch + 1u : mok::next_epoch(meeting, me.epoch));
  }

  bool all_have_come(const World& world, int r) const {
    const uint8_t epoch = settings_.bug == Bug::kTakesOldFlags ? 1 : world.ranks[r].epoch;
    for (int p = 0; p < settings_.ranks; ++p) {
      if (p != r && world.places[r][p].epoch < epoch) {
        return false;
      }
    }
    return true;
  }

  void look(World& world, Rank& me, const Place& mine) const {
    const bool failed = mok::has_failed_since(mine.failed, mok::entry_of(me.epoch));
    world.is_misread |= failed != (mine.failed_call >= me.call);
    if (failed && settings_.bug != Bug::kIgnoresFailure) {
      fail(me);
    }
  }

  // What it has read does not matter any more.
  static void fail(Rank& me) {
    me.met = 0;
    std::memset(me.saw, 0, sizeof(me.saw));
    std::memset(me.took, 0, sizeof(me.took));
  }

  // Tokens or rows, for one peer after the other, or for all in one place.
  void write(World& world, int r, uint8_t Place::* what, bool one_by_one) const {
    Rank& me = world.ranks[r];
    if (one_by_one) {
      world.places[me.peer][r].*what = me.call;
      next_peer(me, r);
      return;
    }
    for (int p = 0; p < settings_.ranks; ++p) {
      world.places[p][r].*what = p == r ? 0 : me.call;
    }
    go_on(me, r);
  }

  void next_peer(Rank& me, int r) const {
    me.peer = static_cast<uint8_t>(me.peer + 1 + (me.peer + 1 == r));
    if (me.peer >= settings_.ranks) {
      go_on(me, r);
    }
  }

  void go(Rank& me, int r, Phase phase) const {
    me.phase = phase;
    me.peer = static_cast<uint8_t>(first_peer(r));
  }

  // From a phase that has been done for all peers. The end of a call is the next one's kPublish.
  void go_on(Rank& me, int r) const {
    const Bug bug = settings_.bug;
    switch (me.phase) {
      case kPublish:
        return go(me, r, kEntryShow);
      case kEntryShow:
        if (bug != Bug::kAwaitsNoEntry) {
          return go(me, r, kEntryWait);
        }
        [[fallthrough]];
      case kEntryWait:
        if (compares() && bug != Bug::kComparesLate) {
          return go(me, r, kEntryCompare);
        }
        [[fallthrough]];
      case kEntryCompare:
        return go(me, r, kEntryLook);
      case kEntryLook:
        if (compares() && bug == Bug::kComparesLate) {
          return go(me, r, kEntryCompareLate);
        }
        [[fallthrough]];
      case kEntryCompareLate:
        return go(me, r, me.met ? kRead : kEntryFail);
      case kEntryFail:
        return bug == Bug::kPushesUnmet          ? go(me, r, kRead)
               : settings_.failed_leave_exit_out ? go(me, r, kPublish)
                                                 : come_to_exit(me, r);
      case kRead:
        return go(me, r, kMakeRows);
      case kMakeRows:
        return come_to_exit(me, r);
      case kExitFail:
        return go(me, r, kExitShow);
      case kExitShow:
        return go(me, r,
                  me.met                   ? (bug == Bug::kAwaitsNoExit ? kExitLook : kExitWait)
                  : bug == Bug::kShowsLate ? kExitFailLate
                                           : kPublish);
      case kExitLook:
        return go(me, r, me.met ? kTake : kExitGiveUp);
      default:
        return go(me, r, kPublish);
    }
  }

  void come_to_exit(Rank& me, int r) const {
    if (settings_.bug == Bug::kLeavesNoExit) {
      return go(me, r, me.met ? kTake : kPublish);
    }
    me.epoch = epoch_of(mok::Meeting::kExit, me);
    go(me, r, me.met || settings_.bug == Bug::kShowsLate ? kExitShow : kExitFail);
  }

  void finish(World& world, int r) const {
    const Rank& me = world.ranks[r];
    for (int p = 0; p < settings_.ranks; ++p) {
      const bool is_right = p == r || (me.saw[p] == me.call && me.took[p] == me.call);
      world.is_wrong_call |= me.met && !is_right;
    }
    begin_call(world, r, me.call + 1);
  }

  void begin_call(World& world, int r, int call) const {
    Rank& me = world.ranks[r];
    me = {.call = static_cast<uint8_t>(call),
          .phase = kPublish,
          .peer = 0,
          .met = 1,
          .epoch = me.epoch,
          .saw = {},
          .took = {}};
    go(me, r, kPublish);
  }

  const Settings settings_;
};

}  // namespace meeting_model
