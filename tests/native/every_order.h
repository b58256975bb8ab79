#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

// Agents that take one step at a time, in every order or in a random one. A model of them has
//
//   World                    what all of them have done so far
//   Step                     what one of them can do next
//   World first()
//   vector<Step> able(world)     the steps that somebody can take
//   void take(world, step)       takes one
//   bool is_end(world)           whether it is right that nobody can
//   string complaint(world)      what must not have happened; empty if nothing has
//   string code(world)           the same for worlds with the same future
//   string describe(step)
namespace every_order {

template <typename Model>
struct Found {
  size_t worlds = 0;
  std::string complaint;  // about some world, if any
  std::vector<typename Model::Step> trail;
};

template <typename Model>
std::string complaint_about(const Model& model, const typename Model::World& world,
                            const std::vector<typename Model::Step>& able) {
  const std::string complaint = model.complaint(world);
  return complaint.empty() && able.empty() && !model.is_end(world) ? "somebody waits for ever"
                                                                   : complaint;
}

// Breadth first, so that no trail to something wrong is shorter than the one found.
template <typename Model>
Found<Model> search(const Model& model) {
  using World = typename Model::World;
  using Step = typename Model::Step;
  struct Origin {
    size_t before;
    Step step;
  };
  std::vector<Origin> origins{{}};  // of the worlds, in the order in which they are found
  std::deque<World> open{model.first()};
  std::unordered_set<std::string> codes{model.code(open.front())};
  for (size_t world = 0; !open.empty(); ++world) {
    const World now = std::move(open.front());
    open.pop_front();
    const std::vector<Step> able = model.able(now);
    if (std::string complaint = complaint_about(model, now, able); !complaint.empty()) {
      std::vector<Step> trail;
      for (size_t at = world; at != 0; at = origins[at].before) {
        trail.insert(trail.begin(), origins[at].step);
      }
      return {codes.size(), std::move(complaint), std::move(trail)};
    }
    for (const Step& step : able) {
      World next = now;
      model.take(next, step);
      if (codes.insert(model.code(next)).second) {
        open.push_back(std::move(next));
        origins.push_back({world, step});
      }
    }
  }
  return {codes.size(), "", {}};
}

// What there is to complain about in one random order, if anything.
template <typename Model>
std::string walk(const Model& model, std::mt19937& rng) {
  typename Model::World world = model.first();
  while (true) {
    const std::vector<typename Model::Step> able = model.able(world);
    const std::string complaint = complaint_about(model, world, able);
    if (!complaint.empty() || able.empty()) {
      return complaint;
    }
    model.take(world, able[rng() % able.size()]);
  }
}

// Ends the program unless something is wrong in some order just if it is expected to be.
template <typename Model>
void expect(bool wrong, const std::string& name, const Model& model) {
  const Found<Model> found = search(model);
  std::printf("%s: %zu worlds, %s\n", name.c_str(), found.worlds,
              found.complaint.empty() ? "all right" : found.complaint.c_str());
  for (const typename Model::Step& step : found.trail) {
    std::printf("    %s\n", model.describe(step).c_str());
  }
  if (found.complaint.empty() == wrong) {
    std::printf("that was not expected\n");
    std::exit(1);
  }
}

}  // namespace every_order
