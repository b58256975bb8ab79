// The forward kernel's clusters at any speed, in every order for small loads and rings, in random
// ones for larger: whatever the order in which their items begin and end, tokens and hidden rows
// are read as they were written, and nobody waits for ever. With any of the waits left out or cut
// short the same run has to read wrong rows.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "every_order.h"
#include "forward_jobs.h"
#include "kernel_model.h"

using namespace forward_jobs;

namespace {

struct Case {
  std::string name;
  Load load;
  int clusters;
};

Load small_load(int cluster, int ring, std::vector<int> tiles, int columns, int fetchers,
                int own_every = 0) {
  const int most_tiles = std::reduce(tiles.begin(), tiles.end());
  const WorkShape shape = work_shape(cluster, ring, most_tiles, 256 * columns, 128 * columns, 1, 1);
  return {shape, std::move(tiles), fetchers, own_every};
}

void check_every_order() {
  const Case cases[] = {
      {"three clusters of a block", small_load(1, 2, {9, 3}, 2, 0), 3},
      {"two clusters of two blocks", small_load(2, 4, {11, 1}, 2, 0), 2},
      {"three experts", small_load(2, 5, {5, 0, 2}, 2, 0), 2},
      {"a ring with room for steps", small_load(1, 7, {8, 3}, 1, 0), 3},
      {"everything in the ring", small_load(2, 5, {4, 1}, 1, 0), 3},
      {"fetched tokens", small_load(1, 2, {3, 4}, 2, 2), 2},
      {"fetched tokens of two blocks", small_load(2, 4, {6, 1}, 1, 3), 2},
      {"fetched tokens and own", small_load(2, 4, {5, 2}, 1, 2, 2), 2},
  };
  for (const auto& [name, load, clusters] : cases) {
    every_order::expect(false, name, kernel_model::Kernel(Jobs(load, Bug::kNone).work(), clusters));
  }
  const Load load = small_load(1, 2, {3, 1}, 2, 1);
  const auto expect_wrong = [&](Bug bug, const char* name) {
    every_order::expect(true, name, kernel_model::Kernel(Jobs(load, bug).work(), 2));
  };
  expect_wrong(Bug::kReadsUnfetched, "tokens not awaited");
  every_order::expect(
      true, "tokens awaited by the first tile",
      kernel_model::Kernel(Jobs(small_load(1, 2, {3, 1}, 2, 1, 2), Bug::kLooksAtFirstTile).work(),
                           2));
  expect_wrong(Bug::kReadsUnwritten, "hidden rows not awaited");
  expect_wrong(Bug::kOverwritesUnread, "readers not awaited");
  expect_wrong(Bug::kCountsOneLess, "one less awaited");
  expect_wrong(Bug::kReusesSlot, "a ring with a slot less");
  expect_wrong(Bug::kStaleCounters, "counts of the call before");
}

// How many of some random runs read wrong rows.
int wrong_runs(Bug bug, int runs) {
  std::mt19937 rng(11);
  int wrong = 0;
  for (int trial = 0; trial < runs; ++trial) {
    std::vector<int> tiles(1 + rng() % 6);
    for (int& count : tiles) {
      count = rng() % 4 ? rng() % 12 : 0;
    }
    const int most_tiles = std::reduce(tiles.begin(), tiles.end());
    const int cluster = 1 + rng() % 2;
    const int ring = std::max<int>(2 * cluster, rng() % (most_tiles + 3));
    const WorkShape shape = work_shape(cluster, ring, most_tiles, 64 * (1 + rng() % 12),
                                       64 * (1 + rng() % 12), 1 + rng() % 4, 1 + rng() % 20);
    const Load load{shape, tiles, static_cast<int>(rng() % 3), static_cast<int>(rng() % 4)};
    const kernel_model::Kernel kernel(Jobs(load, bug).work(), 1 + rng() % 5);
    const std::string complaint = every_order::walk(kernel, rng);
    wrong += !complaint.empty();
  }
  return wrong;
}

void check_random_orders() {
  if (const int wrong = wrong_runs(Bug::kNone, 2000); wrong > 0) {
    std::printf("%d runs go wrong\n", wrong);
    std::exit(1);
  }
  for (const Bug bug :
       {Bug::kReadsUnfetched, Bug::kLooksAtFirstTile, Bug::kReadsUnwritten, Bug::kOverwritesUnread,
        Bug::kCountsOneLess, Bug::kReusesSlot, Bug::kStaleCounters}) {
    const int wrong = wrong_runs(bug, 400);
    std::printf("bug %d: %d of 400 runs go wrong\n", static_cast<int>(bug), wrong);
    if (wrong == 0) {
      std::exit(1);
    }
  }
}

}  // namespace

int main() {
  check_every_order();
  check_random_orders();
  std::puts("ring good");
}
