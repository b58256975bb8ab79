// Tasks on worker threads: all run, each once, none behind another one that waits, and with the
// floating-point environment of whoever gave them.
//
// links: host/workers.cc
// sanitizers: address,undefined thread
#include "host/workers.h"

#include <atomic>
#include <barrier>
#include <cfenv>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "require.h"

using namespace mok;

namespace {

constexpr int kThreads = 8;

void run_in_threads(const std::function<void(int thread)>& body) {
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < kThreads; ++thread) threads.emplace_back(body, thread);
}

void check_that_all_run_once() {
  constexpr int kTasks = 2000;
  std::vector<std::atomic<int>> runs(kThreads * kTasks);
  std::latch done(kThreads * kTasks);
  run_in_threads([&](int thread) {
    for (int task = 0; task < kTasks; ++task) {
      run_on_worker([&, index = thread * kTasks + task] {
        ++runs[index];
        done.count_down();
      });
    }
  });
  done.wait();
  for (const std::atomic<int>& count : runs) REQUIRE(count == 1);
}

// Each task waits until the others have begun too; the tasks give more tasks, which do the same.
void check_that_none_waits_for_another() {
  constexpr int kTogether = 24;
  for (int round = 0; round < 20; ++round) {
    std::barrier<> first(kTogether), second(kTogether);
    std::latch done(kTogether);
    for (int task = 0; task < kTogether; ++task) {
      run_on_worker([&] {
        first.arrive_and_wait();
        run_on_worker([&] {
          second.arrive_and_wait();
          done.count_down();
        });
      });
    }
    done.wait();
  }
}

void check_that_rounding_is_the_givers() {
  std::atomic<int> wrong = 0;
  std::latch done(2 * kThreads * 100);
  run_in_threads([&](int thread) {
    constexpr int kModes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    for (int task = 0; task < 100; ++task) {
      const int mode = kModes[(thread + task) % std::size(kModes)];
      std::fesetround(mode);
      run_on_worker([&, mode] {
        wrong += std::fegetround() != mode;
        run_on_worker([&, mode] {
          wrong += std::fegetround() != mode;
          done.count_down();
        });
        done.count_down();
      });
    }
  });
  done.wait();
  REQUIRE(wrong == 0);
}

// What a task holds is let go of as soon as it has run, and may then give a task itself.
void check_that_nothing_is_kept() {
  constexpr int kTasks = 100;
  std::latch done(kTasks);
  for (int task = 0; task < kTasks; ++task) {
    const std::shared_ptr<void> held(nullptr,
                                     [&](void*) { run_on_worker([&] { done.count_down(); }); });
    run_on_worker([held] {});
  }
  done.wait();
}

}  // namespace

int main() {
  check_that_all_run_once();
  check_that_none_waits_for_another();
  check_that_rounding_is_the_givers();
  check_that_nothing_is_kept();
  std::puts("workers good");
}
