// The backward kernel's clusters at any speed, in every order for small loads and rings, in random
// ones for larger: whatever the order in which their items begin and end, tokens, pre-activations,
// gradients, hidden rows and partial sums are read as they were meant, and nobody waits for ever.
// With any of the waits left out or cut short the same run has to go wrong.
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backward_jobs.h"
#include "every_order.h"
#include "kernel_model.h"

using namespace backward_jobs;

namespace {

struct Case {
  std::string name;
  Load load;
  int clusters;
};

Load small_load(int cluster, int ring, std::vector<int> tiles, int saved, int fetchers,
                int inner = 256) {
  const int most_tiles = std::reduce(tiles.begin(), tiles.end());
  const BackwardShape shape = backward_shape(cluster, ring, most_tiles, 256, inner, 1);
  return {shape, std::move(tiles), saved, fetchers};
}

void check_every_order() {
  const Case cases[] = {
      {"replayed waves", small_load(1, 2, {2, 1, 2}, 0, 0), 2},
      {"saved pre-activations", small_load(1, 3, {2, 1, 3}, 6, 0), 2},
      {"a saved wave, then replayed ones", small_load(1, 2, {2, 2, 1}, 3, 0), 2},
      {"an expert astride waves", small_load(1, 2, {5}, 2, 0), 2},
      {"three clusters", small_load(1, 2, {2, 2}, 2, 0), 3},
      {"two blocks", small_load(2, 4, {4, 1}, 0, 0), 2},
      {"fetched tokens, replayed waves", small_load(1, 2, {2, 1}, 0, 2), 2},
      {"fetched tokens, saved pre-activations", small_load(1, 2, {2, 1}, 3, 2), 2},
      {"fetched tokens, replayed after a saved wave", small_load(1, 2, {2, 1}, 2, 2), 2},
      // Few enough columns that one gets past the items for which the two others wait.
      {"fetched tokens, three clusters", small_load(1, 2, {1, 1}, 2, 2, 128), 3},
  };
  for (const auto& [name, load, clusters] : cases) {
    every_order::expect(false, name, kernel_model::Kernel(Jobs(load, Bug::kNone).work(), clusters));
  }
  const auto expect_wrong = [](Bug bug, const char* name, int saved_tiles = 0) {
    const Load load = small_load(1, 2, {2, 1}, saved_tiles, 1);
    every_order::expect(true, name, kernel_model::Kernel(Jobs(load, bug).work(), 2));
  };
  expect_wrong(Bug::kReadsUnfetched, "tokens not awaited");
  expect_wrong(Bug::kAwaitsOtherTokens, "x awaited instead of dy");
  expect_wrong(Bug::kAwaitsOtherTokens, "dy awaited instead of x", 3);
  expect_wrong(Bug::kReadsUnreplayed, "pre-activations not awaited");
  expect_wrong(Bug::kReadsUnwritten, "gradients not awaited");
  expect_wrong(Bug::kOverwritesUnread, "waves before not awaited");
  expect_wrong(Bug::kCountsOneLess, "one less awaited");
  expect_wrong(Bug::kReusesSlot, "a ring with a slot less");
  expect_wrong(Bug::kStaleCounters, "counts of the call before");
}

// How many of some random runs go wrong.
int wrong_runs(Bug bug, int runs) {
  std::mt19937 rng(13);
  int wrong = 0;
  for (int trial = 0; trial < runs; ++trial) {
    std::vector<int> tiles(1 + rng() % 6);
    for (int& count : tiles) {
      count = rng() % 4 ? rng() % 10 : 0;
    }
    const int most_tiles = std::reduce(tiles.begin(), tiles.end());
    const int cluster = 1 + rng() % 2;
    const int ring = 2 * cluster + rng() % (most_tiles + 3);
    const BackwardShape shape = backward_shape(cluster, ring, most_tiles, 64 * (1 + rng() % 12),
                                               64 * (1 + rng() % 12), 1 + rng() % 4);
    const Load load{shape, tiles, static_cast<int>(rng() % (most_tiles + 1)),
                    static_cast<int>(rng() % 3)};
    const kernel_model::Kernel kernel(Jobs(load, bug).work(), 1 + rng() % 5);
    wrong += !every_order::walk(kernel, rng).empty();
  }
  return wrong;
}

void check_random_orders() {
  if (const int wrong = wrong_runs(Bug::kNone, 1000); wrong > 0) {
    std::printf("%d runs go wrong\n", wrong);
    std::exit(1);
  }
  for (const Bug bug :
       {Bug::kReadsUnfetched, Bug::kAwaitsOtherTokens, Bug::kReadsUnreplayed, Bug::kReadsUnwritten,
        Bug::kOverwritesUnread, Bug::kCountsOneLess, Bug::kReusesSlot, Bug::kStaleCounters}) {
    const int wrong = wrong_runs(bug, 200);
    std::printf("bug %d: %d of 200 runs go wrong\n", static_cast<int>(bug), wrong);
    if (wrong == 0) {
      std::exit(1);
    }
  }
}

}  // namespace

int main() {
  check_every_order();
  check_random_orders();
  std::puts("rings of the backward kernel good");
}
