// The simulated kernels end, whatever the routes, ring and moves, having sent every row once.
// links: host/plan_builder.cc
// links: rack/clusters.cc rack/puller.cc rack/rank_work.cc rack/simulation.cc rack/transfers.cc
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "rack/simulation.h"
#include "require.h"

using namespace mok;
using namespace mok::rack;

namespace {

constexpr Machine kMachine{.sms = 10,
                           .link_bytes_per_s = 4e11,
                           .request_share = 0.1,
                           .signal_s = 1e-6,
                           .pull_bytes_per_s = 1.5e9,
                           .pull_latency_s = 4e-6,
                           .look_s = 5e-7,
                           .step_s = 6e-7,
                           .gate_up_s = 2e-6,
                           .down_s = 2e-6};

std::vector<int32_t> draw_routes(std::mt19937& rng, const PlanShape& shape) {
  std::vector<int32_t> routes(shape.ranks * shape.choices());
  const int32_t most = rng() % 3 == 0 ? 1 : shape.experts;  // all to the first expert
  for (int32_t& id : routes) {
    id = static_cast<int32_t>(rng() % most);
    id = rng() % 10 == 0 ? kMaskedChoice : id;
  }
  return routes;
}

double sum(const Traffic& traffic) {
  return std::reduce(traffic.bytes.begin(), traffic.bytes.end());
}

void check(std::mt19937& rng) {
  const auto ranks = static_cast<int32_t>(1 + rng() % 9);
  const PlanShape shape{ranks,
                        static_cast<int64_t>(1 + rng() % 300),
                        static_cast<int32_t>(1 + rng() % 4),
                        static_cast<int32_t>(ranks * (1 + rng() % 4)),
                        sm90::kTileRows,
                        64 * (1 + static_cast<int64_t>(rng() % 4))};
  const Sizes sizes{shape, static_cast<int32_t>(64 * (1 + rng() % 9)),
                    static_cast<int32_t>(64 * (1 + rng() % 9)),
                    64 * (4 + static_cast<int64_t>(rng() % 40))};
  const std::vector<int32_t> routes = draw_routes(rng, shape);
  std::vector<RankWork> works;
  double tokens = 0;
  double rows = 0;
  const bool repeats_tokens = rng() % 4 == 0;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    works.push_back(work_of(sizes, routes, rank, repeats_tokens));
    tokens += static_cast<double>(works.back().token_targets.size());
    for (const int32_t other : works.back().choice_rank) {
      rows += other >= 0 && other != rank;
    }
  }
  for (const PullOrder order : {PullOrder::kPeers, PullOrder::kRows, PullOrder::kPlan}) {
    const Moves moves{.dispatch_push = rng() % 3 == 0,
                      .combine_push = rng() % 3 != 0,
                      .pull_order = order,
                      .token_bytes = 2.0 * sizes.hidden,
                      .output_bytes = 2.0};
    const Outcome outcome = simulate(sizes, works, kMachine, moves, 1e-5);
    const double width = 2.0 * sizes.hidden;
    REQUIRE(std::abs(sum(outcome.dispatch) - tokens * width) < 1);
    REQUIRE(std::abs(sum(outcome.combine) - rows * width) < 1);
    for (int32_t rank = 0; rank < ranks; ++rank) {
      REQUIRE(outcome.busy_s[rank] <= outcome.kernel_s[rank] * (1 + 1e-9));
      REQUIRE(outcome.tokens_s[rank] <= outcome.kernel_s[rank]);
    }
  }
}

}  // namespace

int main() {
  std::mt19937 rng(72);
  for (int trial = 0; trial < 60; ++trial) {
    check(rng);
  }
  std::puts("rack good");
}
