// Every order in which a cluster's warps can fill, read and release a few stages: whichever waits
// expire, no barrier gets more arrivals than it expects, no stage is filled while copies to it are
// under way, and what is read is what should be; and if none expires all come to their ends. With
// parts of the protocol left out there has to be an order for which this is wrong.
#include <cstdio>
#include <string>

#include "every_order.h"
#include "stages_model.h"

using namespace stages_model;

namespace {

constexpr Fill kC = Fill::kCopies, kG = Fill::kGathers, kF = Fill::kFirstOnly;

void expect(bool wrong, const std::string& name, const Settings& settings) {
  every_order::expect(wrong, name + (settings.expires ? "" : ", nobody late"), Stages(settings));
}

void check_all_right() {
  for (const bool expires : {false, true}) {
    expect(false, "a block", {1, 2, 2, 2, {{kG, kC, kG}, {kG, kG}}, expires});
    expect(false, "two blocks", {2, 1, 1, 2, {{kC, kG}, {kC}}, expires});
    expect(false, "more who multiply", {2, 1, 2, 1, {{kC}, {kC}, {kG}}, expires});
    expect(false, "more who load", {2, 2, 1, 1, {{kC}, {kC}}, expires});
  }
  expect(false, "more who gather", {2, 2, 1, 1, {{kG}, {kC}}, false});
}

void check_bugs() {
  const auto expect_wrong = [](Bug bug, const char* name) {
    expect(true, name, {2, 1, 1, 1, {{kC}, {kG}, {kC}}, true, bug});
  };
  expect_wrong(Bug::kReleasesLate, "stages released late");
  expect_wrong(Bug::kWaitsAgain, "waits after one that has expired");
  expect_wrong(Bug::kAwaitsNoRoom, "no wait for room");
  expect_wrong(Bug::kLoadsLate, "stages filled late");
  expect_wrong(Bug::kCountsOwnBlock, "room in one block");
  expect_wrong(Bug::kCountsNoGathers, "gathered rows not counted");
  expect(true, "stages released early", {1, 1, 1, 2, {{kC, kG}, {kC}}, true, Bug::kReleasesEarly});
}

// Stages that get nothing from the second loading warp, as some of the backward kernel's
// pre-activations do not. If these were full without it, they could be read and released before it
// has seen the phase that it waits for, and it would wait for ever (or until it is late).
void check_stages_of_first_loader() {
  for (const auto& items :
       {std::vector<std::vector<Fill>>{{kC}, {kF}, {kC, kC}}, {{kC, kF, kF, kC}}}) {
    for (const bool expires : {false, true}) {
      expect(false, "copies of one loader", {1, 2, 1, 2, items, expires});
    }
    expect(true, "the first loader arrives for all", {1, 2, 1, 2, items, false, Bug::kFirstForAll});
  }
}

}  // namespace

int main() {
  check_all_right();
  check_bugs();
  check_stages_of_first_loader();
  std::puts("stages good");
}
