#pragma once

#include <algorithm>
#include <vector>

#include "kernel_model.h"
#include "units.h"

// What the forward kernel's blocks wait for, read, write and tell (sm90/forward_schedule.cuh,
// forward_multiplier.cuh), in the words of kernel_model.h.
namespace forward_jobs {

using namespace mok::sm90;

enum class Bug {
  kNone,
  kReadsUnfetched,    // tokens are not awaited
  kLooksAtFirstTile,  // nor by blocks whose first tile has none of a peer
  kReadsUnwritten,    // hidden rows are not awaited
  kOverwritesUnread,  // nor their readers, by those who take their place
  kCountsOneLess,
  kReusesSlot,     // two tiles that may be under way have the same place
  kStaleCounters,  // a call begins with the counts of the last one
};

struct Load {
  WorkShape shape;
  std::vector<int> tiles;  // by expert
  int fetchers = 0;        // of the tokens of the tiles, in turn
  int own_every = 0;  // so many tiles' one has no tokens of a peer; 0: none but without fetchers

  bool is_own(int tile) const { return fetchers == 0 || (own_every > 0 && tile % own_every == 0); }
};

class Jobs {
 public:
  Jobs(const Load& load, Bug bug)
      : load_(load), bug_(bug), starts_(starts_of(load.shape, load.tiles)) {}

  kernel_model::Work work() const {
    const WorkShape& shape = load_.shape;
    const UnitTable table{shape, starts_.data(), static_cast<int>(load_.tiles.size())};
    kernel_model::Work work;
    work.blocks = shape.cluster;
    const Units units = starts_.back().units;
    work.items.resize(units.items(shape.gate_up_columns, shape.cluster) +
                      units.items(shape.down_columns, shape.cluster));
    for (int unit = 0; unit < units.count(); ++unit) {
      table.place_items(unit, 0, 1, [&](int position, const WorkItem& item) {
        for (int block = 0; block < shape.cluster; ++block) {
          work.items[position].push_back(job(block_work(item, block)));
        }
      });
    }
    work.fetchers.resize(load_.fetchers);
    for (int tile = 0; tile < tiles(); ++tile) {
      if (!load_.is_own(tile)) {
        work.fetchers[tile % load_.fetchers].push_back(
            {{}, {}, {{token_place(tile), tile}}, {fetched(tile)}});
      }
    }
    work.places = token_place(tiles());
    work.counters.resize(3 * tiles());
    if (bug_ == Bug::kStaleCounters) {
      std::ranges::fill(work.counters, std::max(shape.gate_up_columns, shape.down_columns));
    }
    return work;
  }

 private:
  int tiles() const { return starts_.back().tile; }

  int hidden_ready(int tile) const { return tile; }
  int down_done(int tile) const { return tiles() + tile; }
  int fetched(int tile) const { return 2 * tiles() + tile; }

  int hidden_place(int tile, int column) const {
    const int slot = place_in_ring(tile, load_.shape.ring_tiles - (bug_ == Bug::kReusesSlot));
    return slot * load_.shape.gate_up_columns + column;
  }
  int token_place(int tile) const {
    return load_.shape.ring_tiles * load_.shape.gate_up_columns + tile;
  }

  kernel_model::Job job(const BlockWork& work) const {
    kernel_model::Job job;
    for (int tile = work.tile; tile < work.tile + work.tiles; ++tile) {
      work.product == Product::kDown ? add_down(work, tile, job) : add_gate_up(work, tile, job);
    }
    if (work.product == Product::kGateUp && awaits_tokens(work)) {
      for (int tile = 0; tile < work.tile + work.tiles; ++tile) {
        if (!load_.is_own(tile)) {
          job.awaits.push_back({fetched(tile), 1});
        }
      }
    }
    return job;
  }

  bool awaits_tokens(const BlockWork& work) const {
    const int looks_at = bug_ == Bug::kReadsUnfetched     ? 0
                         : bug_ == Bug::kLooksAtFirstTile ? 1
                                                          : work.tiles;
    for (int i = 0; i < looks_at; ++i) {
      if (!load_.is_own(work.tile + i)) {
        return true;
      }
    }
    return false;
  }

  void add_gate_up(const BlockWork& work, int tile, kernel_model::Job& job) const {
    const int former = former_tile(tile, load_.shape.ring_tiles);
    if (former >= 0 && bug_ != Bug::kOverwritesUnread) {
      job.awaits.push_back({down_done(former), all_of(Product::kDown)});
    }
    if (work.column_block < load_.shape.gate_up_columns) {
      job.writes.push_back({hidden_place(tile, work.column_block), tile});
      job.tells.push_back(hidden_ready(tile));
      if (!load_.is_own(tile)) {
        job.reads.push_back({token_place(tile), tile});
      }
    }
  }

  void add_down(const BlockWork& work, int tile, kernel_model::Job& job) const {
    if (bug_ != Bug::kReadsUnwritten) {
      job.awaits.push_back({hidden_ready(tile), all_of(Product::kGateUp)});
    }
    if (work.column_block < load_.shape.down_columns) {
      for (int column = 0; column < load_.shape.gate_up_columns; ++column) {
        job.reads.push_back({hidden_place(tile, column), tile});
      }
      job.tells.push_back(down_done(tile));
    }
  }

  int all_of(Product product) const {
    return load_.shape.columns(product) - (bug_ == Bug::kCountsOneLess);
  }

  const Load load_;
  const Bug bug_;
  const std::vector<Start> starts_;
};

}  // namespace forward_jobs
