// The forward kernel's clusters at random speeds, over random loads and rings: whatever the order
// in which their items begin and end, hidden rows are read as they were written, and nobody waits
// for ever. With any of the waits left out or cut short the same run has to read wrong rows.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "units.h"

using namespace mok::sm90;

namespace {

enum class Bug { kNone, kReadsUnwritten, kOverwritesUnread, kCountsOneLess };

constexpr int kClaimsAhead = 1;  // beside the item that is being multiplied

// A block of a cluster, at an item.
struct Claim {
  WorkItem item;
  bool has_begun;
};

class Kernel {
 public:
  Kernel(const WorkShape& shape, const std::vector<int>& tiles, int clusters, Bug bug,
         std::mt19937& rng)
      : shape_(shape), claims_(clusters), bug_(bug), rng_(rng), starts_(starts_of(shape, tiles)) {
    const Start total = starts_.back();
    const UnitTable table{shape_, starts_.data(), static_cast<int32_t>(tiles.size())};
    items_.resize(total.units.items(shape.gate_up_columns, shape.cluster) +
                  total.units.items(shape.down_columns, shape.cluster));
    for (int unit = 0; unit < total.units.count(); ++unit) {
      table.place_items(unit, 0, 1,
                        [&](int position, const WorkItem& item) { items_[position] = item; });
    }
    tiles_ = total.tile;
    ready_.assign(tiles_, 0);
    done_.assign(tiles_, 0);
    ring_.assign(shape.ring_tiles, std::vector<int>(shape.gate_up_columns, -1));
  }

  enum class End { kRight, kWrongRows, kStuck };

  End run() {
    while (true) {
      std::vector<int> able;
      for (int c = 0; c < static_cast<int>(claims_.size()); ++c) {
        if (can_claim(c) || can_step(c)) {
          able.push_back(c);
        }
      }
      if (able.empty()) {
        return std::ranges::all_of(claims_, [](const auto& own) { return own.empty(); })
                   ? End::kRight
                   : End::kStuck;
      }
      const int c = able[rng_() % able.size()];
      if (can_claim(c) && (rng_() % 2 || !can_step(c))) {
        claims_[c].push_back({items_[next_++], false});
      } else if (!step(claims_[c])) {
        return End::kWrongRows;
      }
    }
  }

 private:
  bool can_claim(int c) const { return next_ < items_.size() && claims_[c].size() <= kClaimsAhead; }

  bool can_step(int c) const {
    return !claims_[c].empty() && (claims_[c].front().has_begun || may_begin(claims_[c].front()));
  }

  // What the scheduling warps of both blocks wait for.
  bool may_begin(const Claim& claim) const {
    const int slack = bug_ == Bug::kCountsOneLess ? 1 : 0;
    bool may = true;
    for_each_tile(claim.item, [&](const BlockWork& work, int tile) {
      if (work.product == Product::kDown) {
        may &= bug_ == Bug::kReadsUnwritten || ready_[tile] >= shape_.gate_up_columns - slack;
      } else if (tile >= shape_.ring_tiles) {
        may &= bug_ == Bug::kOverwritesUnread ||
               done_[tile - shape_.ring_tiles] >= shape_.down_columns - slack;
      }
    });
    return may;
  }

  // Begins or ends the first item of a cluster. Rows are written when it begins, told when it ends,
  // and read both times: whoever overwrites them meanwhile is found.
  bool step(std::vector<Claim>& own) {
    Claim& claim = own.front();
    bool right = true;
    for_each_tile(claim.item, [&](const BlockWork& work, int tile) {
      std::vector<int>& rows = ring_[tile % shape_.ring_tiles];
      if (work.product == Product::kDown) {
        right &= std::ranges::all_of(rows, [&](int written) { return written == tile; });
        done_[tile] += claim.has_begun && work.column_block < shape_.down_columns;
      } else if (work.column_block < shape_.gate_up_columns) {
        rows[work.column_block] = tile;
        ready_[tile] += claim.has_begun;
      }
    });
    if (claim.has_begun) {
      own.erase(own.begin());
    } else {
      claim.has_begun = true;
    }
    return right;
  }

  template <typename Visit>
  void for_each_tile(const WorkItem& item, const Visit& visit) const {
    for (int block = 0; block < shape_.cluster; ++block) {
      const BlockWork work = block_work(item, block);
      for (int tile = work.tile; tile < work.tile + work.tiles; ++tile) {
        visit(work, tile);
      }
    }
  }

  const WorkShape shape_;
  std::vector<std::vector<Claim>> claims_;
  const Bug bug_;
  std::mt19937& rng_;
  const std::vector<Start> starts_;
  std::vector<WorkItem> items_;
  size_t next_ = 0;
  int tiles_;
  std::vector<int> ready_, done_;
  std::vector<std::vector<int>> ring_;  // the tile whose rows lie there, by column block
};

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
    switch (Kernel(shape, tiles, 1 + rng() % 5, bug, rng).run()) {
      case Kernel::End::kRight:
        break;
      case Kernel::End::kWrongRows:
        ++wrong;
        break;
      case Kernel::End::kStuck:
        std::printf("bug %d, run %d: clusters wait for ever\n", static_cast<int>(bug), trial);
        std::exit(1);
    }
  }
  return wrong;
}

}  // namespace

int main() {
  if (const int wrong = wrong_runs(Bug::kNone, 4000); wrong > 0) {
    std::printf("%d runs read wrong rows\n", wrong);
    return 1;
  }
  for (const Bug bug : {Bug::kReadsUnwritten, Bug::kOverwritesUnread, Bug::kCountsOneLess}) {
    const int wrong = wrong_runs(bug, 400);
    if (wrong == 0) {
      std::printf("bug %d not found\n", static_cast<int>(bug));
      return 1;
    }
    std::printf("bug %d: wrong rows in %d of 400 runs\n", static_cast<int>(bug), wrong);
  }
  std::puts("ring good");
}
