// Every order in which a few calls of ranks can go: a call that succeeds on a rank has read the
// tokens of that call of all ranks, and taken the rows of that call of all; flags say of a call
// what their ranks have shown; and ranks that make different calls do not meet. With any of the
// protocol's parts left out there has to be an order for which this is wrong.
#include "core/meeting.h"

#include <cstdint>
#include <cstdio>
#include <string>

#include "every_order.h"
#include "meeting_model.h"
#include "require.h"

using namespace meeting_model;

namespace {

// Whatever a rank has left out, its next entry is odd and its next exit even, and both are later.
void check_epochs() {
  for (uint64_t last = 0; last < 10; ++last) {
    const uint64_t entry = next_epoch(mok::Meeting::kEntry, last);
    const uint64_t exit = next_epoch(mok::Meeting::kExit, last);
    REQUIRE(entry % 2 == 1 && entry > last && entry <= last + 2);
    REQUIRE(exit % 2 == 0 && exit > last && exit <= last + 2);
    REQUIRE(mok::entry_of(entry) == entry && mok::entry_of(exit) == exit - 1);
  }
}

// Has to find a rank that has failed in a call and is about to succeed in a later one.
struct MeetingsWithoutRecovery : Meetings {
  using Meetings::Meetings;

  std::string complaint(const World& world) const {
    const bool recovers = world.ranks[0].phase == kTake && world.places[1][0].failed_call > 0;
    return recovers ? "a rank comes back" : "";
  }
};

void expect(bool wrong, const std::string& name, const Settings& settings) {
  every_order::expect(
      wrong,
      name + (settings.moves == Moves::kPullTokensPushRows ? ", rows pushed" : ", rows pulled"),
      Meetings(settings));
}

}  // namespace

int main() {
  check_epochs();
  for (const Moves moves : {Moves::kPullTokensPushRows, Moves::kPushTokensPullRows}) {
    expect(false, "two ranks", {moves, 2, 4});
    expect(false, "three ranks", {moves, 3, 2});
    expect(false, "another call", {moves, 2, 3, Bug::kNone, false, 2});
    expect(false, "the exit left out after a failure", {moves, 2, 4, Bug::kNone, true});
    every_order::expect(true, "a call after a failed one", MeetingsWithoutRecovery({moves, 2, 2}));
    expect(true, "no wait at the entry", {moves, 2, 2, Bug::kAwaitsNoEntry});
    expect(true, "no wait at the exit", {moves, 2, 2, Bug::kAwaitsNoExit});
    expect(true, "no exit", {moves, 2, 3, Bug::kLeavesNoExit});
    expect(true, "flags of other calls", {moves, 2, 3, Bug::kTakesOldFlags});
    expect(true, "barriers counted", {moves, 2, 3, Bug::kCountsBarriers, true});
    expect(true, "rows from who has not met", {moves, 2, 3, Bug::kPushesUnmet});
    expect(true, "failures not shown", {moves, 2, 3, Bug::kHidesFailure});
    expect(true, "failures not looked at", {moves, 2, 3, Bug::kIgnoresFailure});
    expect(true, "failures shown late", {moves, 2, 3, Bug::kShowsLate});
    expect(true, "calls not compared", {moves, 2, 2, Bug::kComparesNoCalls, false, 1});
    expect(true, "calls compared with any", {moves, 2, 2, Bug::kComparesAnyCall});
    expect(true, "calls compared late", {moves, 2, 2, Bug::kComparesLate, false, 1});
  }
  std::puts("meetings good");
}
