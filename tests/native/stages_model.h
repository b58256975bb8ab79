#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "stages_world.h"

// The ring of stages between a cluster's loading and multiplying warps (sm90/load.cuh,
// sm90/multiply.cuh), with waits that may expire and copies that come at any later time. One that
// never comes needs no step of its own: what must not happen has happened before that matters.
// A model for every_order.h.
namespace stages_model {

class Stages {
 public:
  using World = stages_model::World;

  enum class Action : uint8_t { kFill, kStop, kCome, kMultiply, kBeLate };

  struct Step {
    Action action;
    uint8_t block, who;  // a warp, or the bit of what comes
    uint8_t where;       // a step, a stage, or a lane
  };

  explicit Stages(const Settings& settings) : settings_(settings) {
    for (const std::vector<Fill>& item : settings.items) {
      fills_.insert(fills_.end(), item.begin(), item.end());
      is_last_.resize(fills_.size());
      is_last_.back() = true;
    }
  }

  World first() const {
    World world;
    std::memset(&world, 0, sizeof(world));
    const int blocks = settings_.bug == Bug::kCountsOwnBlock ? 1 : settings_.blocks;
    for (int b = 0; b < settings_.blocks; ++b) {
      for (int s = 0; s < settings_.stages; ++s) {
        world.stages[b][s].full.init(static_cast<uint8_t>(full_arrivals()));
        world.stages[b][s].empty.init(static_cast<uint8_t>(settings_.multipliers * blocks));
      }
    }
    return world;
  }

  // Loaders and multipliers may also be late where they need not wait for a stage: the item may not
  // have been handed out.
  std::vector<Step> able(const World& world) const {
    std::vector<Step> steps;
    const auto add = [&](bool can, Action action, int block, int who, int where) {
      if (can) {
        steps.push_back({action, static_cast<uint8_t>(block), static_cast<uint8_t>(who),
                         static_cast<uint8_t>(where)});
      }
    };
    for (int b = 0; b < settings_.blocks; ++b) {
      for (int w = 0; w < settings_.loaders; ++w) {
        const Loader& me = world.loaders[b][w];
        add(!is_done(me) && has_room(world, b, me), Action::kFill, b, w, me.step);
        add(!is_done(me) && settings_.expires && me.late == 0, Action::kStop, b, w, me.step);
      }
      for (int m = 0; m < settings_.multipliers; ++m) {
        const Multiplier& me = world.multipliers[b][m];
        add(!is_done(me) && may_multiply(world, b, me), Action::kMultiply, b, m, me.step);
        for (int lane = 0; lane < settings_.blocks; ++lane) {
          const bool is_late = (me.late >> lane & 1) != 0;
          add(!is_done(me) && settings_.expires && !is_late, Action::kBeLate, b, m, lane);
        }
      }
      for (int s = 0; s < settings_.stages; ++s) {
        for (int bit = 0; bit < gather_bit(kMostWarps); ++bit) {
          add((world.stages[b][s].under_way >> bit & 1) != 0, Action::kCome, b, bit, s);
        }
      }
    }
    return steps;
  }

  void take(World& world, const Step& step) const {
    switch (step.action) {
      case Action::kFill:
        return fill(world, step.block, step.who, world.loaders[step.block][step.who].step++);
      case Action::kStop:
        world.loaders[step.block][step.who].late = 1;
        return;
      case Action::kCome:
        return come(world.stages[step.block][step.where], step.who);
      case Action::kMultiply:
        return multiply(world, step.block, world.multipliers[step.block][step.who]);
      case Action::kBeLate:
        world.multipliers[step.block][step.who].late |= 1 << step.where;
        return;
    }
  }

  bool is_end(const World& world) const {
    for (int b = 0; b < settings_.blocks; ++b) {
      for (int w = 0; w < kMostWarps; ++w) {
        if ((w < settings_.loaders && !is_done(world.loaders[b][w])) ||
            (w < settings_.multipliers && !is_done(world.multipliers[b][w]))) {
          return false;
        }
      }
    }
    return true;
  }

  std::string complaint(const World& world) const {
    for (const auto& block : world.stages) {
      for (const Stage& stage : block) {
        if (stage.full.overrun != 0 || stage.empty.overrun != 0) {
          return "a barrier is told of more arrivals than it expects";
        }
      }
    }
    return world.is_crowded   ? "a stage is filled while copies to it are under way"
           : world.is_misread ? "a stage is read that does not hold what it should"
                              : "";
  }

  // It does not matter where those have come to who have no part in stages any more, nor which of a
  // block's multiplying warps is which.
  std::string code(const World& world) const {
    World same = world;
    for (int b = 0; b < settings_.blocks; ++b) {
      for (Loader& loader : same.loaders[b]) {
        if (is_done(loader)) {
          loader = {static_cast<uint8_t>(fills_.size()), 0};
        }
      }
      for (Multiplier& multiplier : same.multipliers[b]) {
        if (settings_.bug == Bug::kNone && multiplier.late == all_lanes()) {
          multiplier.step = 0;
        }
      }
      std::sort(same.multipliers[b], same.multipliers[b] + settings_.multipliers);
    }
    return {reinterpret_cast<const char*>(&same), sizeof(same)};
  }

  std::string describe(const Step& step) const {
    const auto named = [](const char* what, int number) { return what + std::to_string(number); };
    const std::string warp = named(" warp ", step.who) + named(" of block ", step.block);
    switch (step.action) {
      case Action::kFill:
        return "loading" + warp + named(" fills its stage for step ", step.where);
      case Action::kStop:
        return "loading" + warp + named(" is late at step ", step.where);
      case Action::kCome:
        return (step.who < gather_bit(0)
                    ? named("a copy of warp ", step.who % kMostWarps) +
                          named(" of block ", step.who / kMostWarps)
                    : named("what is gathered by warp ", step.who - gather_bit(0))) +
               named(" comes to stage ", step.where) + named(" of block ", step.block);
      case Action::kMultiply:
        return "multiplying" + warp + named(" begins step ", step.where);
      default:
        return named("lane ", step.where) + " of multiplying" + warp + " is late";
    }
  }

 private:
  int all_lanes() const { return (1 << settings_.blocks) - 1; }
  int stage_of(int step) const { return step % settings_.stages; }
  int parity_of(int step) const { return step / settings_.stages % 2; }
  int full_arrivals() const {
    return 1 + (settings_.bug == Bug::kCountsNoGathers ? 0 : settings_.loaders);
  }

  bool is_done(const Loader& me) const {
    return me.step == fills_.size() || (me.late != 0 && settings_.bug != Bug::kLoadsLate);
  }
  bool is_done(const Multiplier& me) const { return me.step == fills_.size(); }

  bool has_room(const World& world, int block, const Loader& me) const {
    const Mbarrier& empty = world.stages[block][stage_of(me.step)].empty;
    return settings_.bug == Bug::kAwaitsNoRoom || me.late != 0 ||
           empty.has_ended(parity_of(me.step) ^ 1);
  }
  bool may_multiply(const World& world, int block, const Multiplier& me) const {
    const Mbarrier& full = world.stages[block][stage_of(me.step)].full;
    return me.late == all_lanes() || full.has_ended(parity_of(me.step));
  }

  static bool copies(Fill fill, int block, int warp, int to) {
    return fill != Fill::kFirstOnly || (warp == 0 && block == to);
  }
  // What a block's stage gets, by bits.
  int tensors(Fill fill, int to) const {
    int bits = 0;
    for (int b = 0; b < settings_.blocks; ++b) {
      for (int w = 0; w < settings_.loaders; ++w) {
        bits |= copies(fill, b, w, to) << copy_bit(b, w);
      }
    }
    return bits;
  }
  int gathered(Fill fill) const {
    return fill == Fill::kGathers ? ((1 << settings_.loaders) - 1) << gather_bit(0) : 0;
  }

  void fill(World& world, int block, int warp, int step) const {
    const Fill fill = fills_[step];
    const bool gathers = fill == Fill::kGathers;
    Stage& mine = world.stages[block][stage_of(step)];
    if (warp == 0) {
      const bool is_for_all = settings_.bug == Bug::kFirstForAll;
      mine.full.announce(std::popcount(static_cast<unsigned>(tensors(fill, block))));
      mine.full.arrive(gathers ? 1 : is_for_all ? full_arrivals() : 2);
    } else if (!gathers && settings_.bug != Bug::kFirstForAll) {
      mine.full.arrive(1);
    }
    for (int to = 0; to < settings_.blocks; ++to) {
      if (copies(fill, block, warp, to)) {
        world.begin_copy(world.stages[to][stage_of(step)], step, copy_bit(block, warp));
      }
    }
    if (gathers) {
      world.begin_copy(mine, step, gather_bit(warp));
    }
  }

  void come(Stage& stage, int bit) const {
    stage.under_way &= ~(1 << bit);
    stage.here |= 1 << bit;
    if (bit < gather_bit(0)) {
      stage.full.receive_copy();
    } else if (settings_.bug != Bug::kCountsNoGathers) {
      stage.full.arrive(1);
    }
  }

  // The products of a stage are done when those of the item's next one are under way.
  void multiply(World& world, int block, Multiplier& me) const {
    const int step = me.step++;
    const bool is_early = settings_.bug == Bug::kReleasesEarly;
    const bool holds_one = step > 0 && !is_last_[step - 1];
    if (me.late != all_lanes()) {
      const Stage& stage = world.stages[block][stage_of(step)];
      const int all = tensors(fills_[step], block) | gathered(fills_[step]);
      world.is_misread |= stage.step != step + 1 || stage.here != all;
      world.is_misread |= holds_one && world.stages[block][stage_of(step - 1)].step != step;
    }
    if (holds_one && !is_early) {
      release(world, block, me, step - 1);
    }
    if (is_last_[step] || is_early) {
      release(world, block, me, step);
    }
    if (settings_.bug == Bug::kWaitsAgain) {
      me.late = 0;
    }
  }

  // All at once: a loader that sees it later is one that takes longer.
  void release(World& world, int block, const Multiplier& me, int step) const {
    for (int b = 0; b < settings_.blocks; ++b) {
      const bool is_late = (me.late >> b & 1) != 0 && settings_.bug != Bug::kReleasesLate;
      if (!is_late && (settings_.bug != Bug::kCountsOwnBlock || b == block)) {
        world.stages[b][stage_of(step)].empty.arrive(1);
      }
    }
  }

  const Settings settings_;
  std::vector<Fill> fills_;    // by step
  std::vector<bool> is_last_;  // of its item
};

}  // namespace stages_model
