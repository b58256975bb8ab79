// Which rows fetch a token, against the rows laid out one by one: of those of a rank that need a
// peer's token, the lowest and no other, for random routes with masked choices, ids out of range
// and the same expert twice.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "core/plan.h"
#include "require.h"

using namespace mok;

namespace {

// The choices that fill a rank's rows, in the order of the rows, without padding.
std::vector<int64_t> rows_of(const PlanShape& shape, const std::vector<int32_t>& routes, int rank) {
  const int experts = shape.experts / shape.ranks;
  std::vector<int64_t> rows;
  for (int expert = rank * experts; expert < (rank + 1) * experts; ++expert) {
    for (int64_t choice = 0; choice < (int64_t)routes.size(); ++choice) {
      if (routes[choice] == expert) rows.push_back(choice);
    }
  }
  return rows;
}

}  // namespace

int main() {
  std::mt19937 rng(3);
  int64_t tokens_fetched = 0, rows_without = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const int ranks = 1 + rng() % 5, experts = ranks * (1 + rng() % 4);
    const int tokens = 1 + rng() % 20, top_k = 1 + rng() % 9;
    const PlanShape shape{.ranks = ranks,
                          .tokens = tokens,
                          .top_k = top_k,
                          .experts = experts,
                          .tile_rows = 64,
                          .chunk_rows = 64};
    std::vector<int32_t> routes(ranks * shape.choices());
    for (int32_t& id : routes) {
      const int kind = rng() % 10;
      id = kind == 0   ? kMaskedChoice
           : kind == 1 ? experts + (int)(rng() % 3)
           : kind == 2 ? -2 - (int)(rng() % 3)
                       : (int)(rng() % experts);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      std::map<int64_t, int64_t> lowest;  // choice of each peer's token
      std::set<int64_t> firsts;
      for (const int64_t choice : rows_of(shape, routes, rank)) {
        const int64_t token = choice / shape.top_k;
        if (token / shape.tokens == rank) continue;
        rows_without += !lowest.try_emplace(token, choice).second;
        if (needs_first(shape, routes.data(), choice)) REQUIRE(firsts.insert(choice).second);
      }
      REQUIRE(firsts.size() == lowest.size());
      for (const auto& [token, choice] : lowest) REQUIRE(firsts.contains(choice));
      tokens_fetched += lowest.size();
    }
  }
  REQUIRE(tokens_fetched > 10000 && rows_without > 10000);
  std::puts("first rows good");
}
