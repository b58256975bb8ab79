// A machine that gives no more threads: whoever meets is told, nobody's memory is touched
// afterwards, and all goes on once there are threads again.
//
// links: host/rendezvous.cc host/faults.cc host/workers.cc
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "host/faults.h"
#include "host/rendezvous.h"
#include "require.h"

namespace {
std::atomic<int> threads_left{0};
}

// In place of the library's, which std::thread calls.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) {
  if (threads_left <= 0) return EAGAIN;
  --threads_left;
  static const auto create =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return create(thread, attributes, body, argument);
}

using namespace mok;
using namespace std::chrono_literals;

namespace {

// What one rank was told, and whether its meeting's work was done.
struct Told {
  std::atomic<int> works{0}, times{0};
  std::string error;  // written before `times`

  void wait() const {
    while (times == 0) std::this_thread::sleep_for(1ms);
  }
};

// Rank 0 comes to a meeting of its own.
void come(Told& told, int ranks, std::chrono::duration<double> timeout) {
  static int64_t run = 0;
  meet(
      {0, run++, 0}, {Operation::kPlan, 0, ranks, timeout}, 0, 1,
      [&](std::span<const int* const>, int) { ++told.works; },
      [&](const std::string& error) {
        told.error = error;
        ++told.times;
      });
}

}  // namespace

int main() {
  Told alone, absent, again;

  come(alone, 1, 100s);
  REQUIRE(alone.times == 1 && alone.works == 0);
  REQUIRE(alone.error.find("the machine gives no threads") != std::string::npos);

  threads_left = 1;  // the one that watches time-outs
  come(absent, 2, 20ms);
  absent.wait();
  REQUIRE(absent.error.find("waited 0.02 s for rank 1 of 2") != std::string::npos);
  REQUIRE(take_faults().faults.size() == 1);

  threads_left = 100;
  come(again, 1, 100s);
  again.wait();
  REQUIRE(again.error.empty() && again.works == 1);
  std::this_thread::sleep_for(100ms);  // in which a task left over would run
  REQUIRE(alone.times == 1 && alone.works == 0);
  REQUIRE(absent.times == 1 && absent.works == 0);
  std::puts("good without threads");
}
