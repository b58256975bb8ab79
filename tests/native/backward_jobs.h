#pragma once

#include <algorithm>
#include <vector>

#include "kernel_model.h"
#include "sm90/backward_work.h"
#include "units.h"

// What the backward kernel's blocks wait for, read, write and tell (sm90/backward_schedule.cuh,
// backward_load.cuh, backward_multiplier.cuh), in the words of kernel_model.h.
//
// Gradients of hidden rows take the places of the pre-activations from which they are computed: of
// those that the forward call has saved, or those that are replayed.
namespace backward_jobs {

using namespace mok::sm90;

enum Tokens { kX, kDy };  // fetched in two turns

enum class Bug {
  kNone,
  kReadsUnfetched,     // tokens are not awaited
  kAwaitsOtherTokens,  // x where dy is needed, if x is first; else the reverse
  kReadsUnreplayed,    // pre-activations are not awaited
  kReadsUnwritten,     // gradients of hidden rows are not awaited
  kOverwritesUnread,   // waves do not await those before
  kCountsOneLess,
  kReusesSlot,     // two tiles of a wave may have the same place
  kStaleCounters,  // a call begins with the counts of the last one
};

struct Load {
  BackwardShape shape;
  std::vector<int> tiles;  // by expert
  int saved_tiles = 0;
  int fetchers = 0;  // of both turns' tokens, each of some tiles
};

class Jobs {
 public:
  Jobs(const Load& load, Bug bug)
      : load_(load), bug_(bug), starts_(starts_of(load.shape.work, load.tiles)) {
    Units before{};
    int first_item = 0;
    do {
      const Units after = table().end_of_wave(before);
      waves_.push_back(table().wave(before, after, load.saved_tiles, first_item));
      first_item = table().ranges_of(waves_.back(), after).weights.end;
      before = after;
    } while (!table().is_end(before));
    waves_.push_back({before, tiles(), first_item, 0, table().units.experts, 0});
  }

  kernel_model::Work work() const {
    kernel_model::Work work;
    work.blocks = shape().work.cluster;
    work.items.resize(waves_.back().first_item);
    const auto place = [&](int position, const WorkItem& item) {
      for (int block = 0; block < work.blocks; ++block) {
        work.items[position].push_back(job(item, block));
      }
    };
    for (int unit = 0; unit < starts_.back().units.count(); ++unit) {
      table().place_unit(unit, waves_.data(), wave_count(), 0, 1, place);
    }
    for (int w = 0; w < wave_count(); ++w) {
      const int count = waves_[w].experts * shape().items_of_expert();
      for (int i = 0; i < count; ++i) {
        const int expert = waves_[w].first_expert + i / shape().items_of_expert();
        place(waves_[w + 1].first_item - count + i,
              table().weight_item(expert, w, i % shape().items_of_expert()));
      }
    }
    work.fetchers.resize(load_.fetchers);
    // One may be at its second turn while another is at its first.
    for (const Tokens tokens : {first_turn(), first_turn() == kX ? kDy : kX}) {
      for (int tile = 0; tile < tiles() && load_.fetchers > 0; ++tile) {
        work.fetchers[tile % load_.fetchers].push_back(
            {{}, {}, {{token_place(tokens, tile), tile}}, {fetched(tokens, tile)}});
      }
    }
    work.places = token_place(kDy, tiles());
    for (int tile = 0; tile < load_.saved_tiles; ++tile) {
      for (int column = 0; column < shape().replay_columns; ++column) {
        work.contents.push_back({saved_place(tile, column), pre_activations(tile)});
      }
    }
    work.counters.resize(wave_done(wave_count()));
    if (bug_ == Bug::kStaleCounters) {
      std::ranges::fill(work.counters, 1000);
    }
    return work;
  }

 private:
  const BackwardShape& shape() const { return load_.shape; }
  int tiles() const { return starts_.back().tile; }
  Tokens first_turn() const { return waves_.front().replays != 0 ? kX : kDy; }
  int wave_count() const { return static_cast<int>(waves_.size()) - 1; }
  BackwardTable table() const {
    return {shape(), {shape().work, starts_.data(), static_cast<int>(load_.tiles.size())}};
  }

  int replayed(int tile) const { return tile; }
  int hidden_ready(int tile) const { return tiles() + tile; }
  int fetched(Tokens tokens, int tile) const { return (2 + tokens) * tiles() + tile; }
  int wave_done(int wave) const { return 4 * tiles() + wave; }

  // Saved pre-activations, and from the same place on the ring of gradients; the ring of weighted
  // hidden rows; partial sums of the weights' gradients; tokens.
  int saved_place(int tile, int column) const { return tile * shape().replay_columns + column; }
  int gradient_place(int tile, int column) const { return saved_place(ring_tile(tile), column); }
  int hidden_place(int tile, int column) const {
    return saved_place(std::max(load_.saved_tiles, ring_tiles()), 0) +
           ring_tile(tile) * shape().hidden_columns + column;
  }
  int sums_place(const WorkItem& item, int block) const {
    const bool is_down = product_of(item) == BackwardProduct::kDownWeights;
    const int columns = shape().replay_columns + shape().down_columns;
    const int column = item.column_block + (is_down ? shape().replay_columns : 0);
    const int of_expert = item.first_tile * columns + column;
    return hidden_place(0, 0) + ring_tiles() * shape().hidden_columns +
           (item.expert * shape().items_of_expert() + of_expert) * shape().work.cluster + block;
  }
  int token_place(Tokens tokens, int tile) const {
    const WorkItem behind{0, 0, static_cast<int>(load_.tiles.size()), 0};
    return sums_place(behind, 0) + tokens * tiles() + tile;
  }

  static int pre_activations(int tile) { return 2 * tile; }
  static int gradients(int tile) { return 2 * tile + 1; }

  int ring_tiles() const { return shape().work.ring_tiles; }
  int ring_tile(int tile) const {
    return place_in_ring(tile, ring_tiles() - (bug_ == Bug::kReusesSlot));
  }

  kernel_model::Job job(const WorkItem& item, int block) const {
    kernel_model::Job job;
    const int wave = wave_of(item);
    for (int before = 0; before < wave && bug_ != Bug::kOverwritesUnread; ++before) {
      const int items =
          shape().last_readers(waves_[before], waves_[before + 1].units, shape().work.cluster);
      await(job, wave_done(before), items * shape().work.cluster);
    }
    const BlockWork work = block_work(item, block);
    switch (product_of(item)) {
      case BackwardProduct::kReplay:
        add_replay(work, job);
        break;
      case BackwardProduct::kHidden:
        add_hidden(work, waves_[wave].replays != 0, job);
        break;
      case BackwardProduct::kInput:
        add_input(work, job);
        job.tells.push_back(wave_done(wave));
        break;
      default:
        add_weights(item, work, wave, sums_place(item, block), job);
        job.tells.push_back(wave_done(wave));
    }
    return job;
  }

  void add_replay(const BlockWork& work, kernel_model::Job& job) const {
    const bool is_used = work.column_block < shape().replay_columns;
    await_tokens(job, kX, work.tile + work.tiles);
    for (int tile = work.tile; is_used && tile < work.tile + work.tiles; ++tile) {
      read_tokens(job, kX, tile);
      job.writes.push_back({gradient_place(tile, work.column_block), pre_activations(tile)});
      job.tells.push_back(replayed(tile));
    }
  }

  void add_hidden(const BlockWork& work, bool replays, kernel_model::Job& job) const {
    const bool is_used = work.column_block < shape().hidden_columns;
    await_tokens(job, kDy, work.tile + work.tiles);
    for (int tile = work.tile; tile < work.tile + work.tiles; ++tile) {
      if (replays && bug_ != Bug::kReadsUnreplayed) {
        await(job, replayed(tile), shape().replay_columns);
      }
      if (!is_used) {
        continue;
      }
      read_tokens(job, kDy, tile);
      for_each_replay_column(work.column_block, [&](int column) {
        const int place = replays ? gradient_place(tile, column) : saved_place(tile, column);
        job.reads.push_back({place, pre_activations(tile)});
        job.writes.push_back({gradient_place(tile, column), gradients(tile)});
      });
      job.writes.push_back({hidden_place(tile, work.column_block), gradients(tile)});
      job.tells.push_back(hidden_ready(tile));
    }
  }

  void add_input(const BlockWork& work, kernel_model::Job& job) const {
    const bool is_used = work.column_block < shape().input_columns;
    for (int tile = work.tile; tile < work.tile + work.tiles; ++tile) {
      await_gradients(job, tile);
      for (int column = 0; is_used && column < shape().replay_columns; ++column) {
        job.reads.push_back({gradient_place(tile, column), gradients(tile)});
      }
    }
  }

  // An expert astride waves has partial sums: those of a wave are known by its number.
  void add_weights(const WorkItem& item, const BlockWork& work, int wave, int sums,
                   kernel_model::Job& job) const {
    const Start own = starts_[item.expert], next = starts_[item.expert + 1];
    const int begin = std::max(own.tile, waves_[wave].first_tile);
    const int end = std::min(next.tile, waves_[wave + 1].first_tile);
    const bool is_down = product_of(item) == BackwardProduct::kDownWeights;
    // Who made a tile's gradients has awaited its dy, but x only if it was replayed.
    if (!is_down) {
      await_tokens(job, kX, end);
    }
    for (int tile = begin; tile < end; ++tile) {
      await_gradients(job, tile);
      read_tokens(job, is_down ? kDy : kX, tile);
      job.reads.push_back({is_down ? hidden_place(tile, work.column_block)
                                   : gradient_place(tile, work.column_block),
                           gradients(tile)});
    }
    if (begin != own.tile) {
      job.reads.push_back({sums, wave - 1});
    }
    if (end != next.tile) {
      job.writes.push_back({sums, wave});
    }
  }

  // Of 128 columns each, in a column block of 256.
  template <typename Visit>
  void for_each_replay_column(int column_block, const Visit& visit) const {
    for (int column = 2 * column_block;
         column < std::min(2 * column_block + 2, shape().replay_columns); ++column) {
      visit(column);
    }
  }

  void await(kernel_model::Job& job, int counter, int target) const {
    job.awaits.push_back({counter, target - (bug_ == Bug::kCountsOneLess)});
  }
  void await_gradients(kernel_model::Job& job, int tile) const {
    if (bug_ != Bug::kReadsUnwritten) {
      await(job, hidden_ready(tile), shape().hidden_columns);
    }
  }
  void await_tokens(kernel_model::Job& job, Tokens tokens, int end) const {
    // Whoever has a tile's tokens of the second turn has those of the first, but not the reverse.
    const Tokens awaited = bug_ == Bug::kAwaitsOtherTokens ? first_turn() : tokens;
    for (int tile = 0; tile < end && load_.fetchers > 0 && bug_ != Bug::kReadsUnfetched; ++tile) {
      await(job, fetched(awaited, tile), 1);
    }
  }
  // A token that several tiles need is fetched for the first of them.
  void read_tokens(kernel_model::Job& job, Tokens tokens, int tile) const {
    for (int first = 0; first <= tile && load_.fetchers > 0; ++first) {
      job.reads.push_back({token_place(tokens, first), first});
    }
  }

  const Load load_;
  const Bug bug_;
  const std::vector<Start> starts_;
  std::vector<BackwardWave> waves_;  // and the end of the last one
};

}  // namespace backward_jobs
