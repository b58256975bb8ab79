// Ranks that meet from threads of their own, punctual, late, absent or twice: everyone is told
// exactly once, all of a meeting the same, after the work is done; and who is missing has a name.
//
// links: host/rendezvous.cc host/faults.cc host/workers.cc host/plan_builder.cc host/transfer.cc
// sanitizers: address,undefined thread
#include "host/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/plan.h"
#include "host/faults.h"
#include "host/plan_builder.h"
#include "host/transfer.h"
#include "require.h"

using namespace mok;
using namespace std::chrono_literals;

namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kLong = 100s;

// As XLA's run ids: no two meetings of this program have the same key.
MeetingKey new_key() {
  static std::atomic<int64_t> next{0};
  const int64_t number = next++;
  return {number % 3, number, static_cast<int32_t>(number % 2)};
}

void run_ranks(int ranks, const std::function<void(int rank)>& body) {
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(body, rank);
}

// What the ranks of one meeting were told.
class Told {
 public:
  explicit Told(int ranks) : errors_(ranks), times_(ranks), all_(ranks) {}

  Done done(int rank) {
    return [this, rank](const std::string& error) {
      {
        const std::lock_guard lock(mutex_);
        errors_[rank] = error;
        ++times_[rank];
      }
      all_.count_down();
    };
  }

  // The errors, once everyone has been told one time.
  std::vector<std::string> wait() {
    all_.wait();
    const std::lock_guard lock(mutex_);
    REQUIRE(std::ranges::count(times_, 1) == static_cast<int>(times_.size()));
    return errors_;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> errors_;
  std::vector<int> times_;
  std::latch all_;
};

bool names(const std::string& error, const std::string& what) {
  return error.find(what) != std::string::npos;
}

// All ranks go through many meetings, each going on to the next as it is told, as XLA does.
void check_chains_of_meetings() {
  for (const int ranks : {1, 2, 5, 16}) {
    constexpr int kMeetings = 150;
    std::vector<MeetingKey> keys(kMeetings);
    std::ranges::generate(keys, new_key);
    std::vector<std::vector<int>> sums(kMeetings, std::vector<int>(ranks));
    std::latch end(ranks);
    // Each rank's own chain: seat `meeting + rank`, one task a rank, which adds up all seats.
    std::function<void(int, int)> go_on = [&](int rank, int meeting) {
      meet(
          keys[meeting], {Operation::kPlan, rank, ranks, kLong}, meeting + rank, ranks,
          [&sums, meeting](std::span<const int* const> seats, int task) {
            for (const int* seat : seats) sums[meeting][task] += *seat;
          },
          [&, rank, meeting](const std::string& error) {
            REQUIRE(error.empty());
            const int expected = ranks * meeting + ranks * (ranks - 1) / 2;
            for (const int sum : sums[meeting]) REQUIRE(sum == expected);
            if (meeting + 1 < kMeetings) {
              go_on(rank, meeting + 1);
            } else {
              end.count_down();
            }
          });
    };
    run_ranks(ranks, [&](int rank) { go_on(rank, 0); });
    end.wait();
  }
}

// Ranks that are told wait for each other without the rendezvous, as in a collective of XLA's.
void check_that_those_told_may_wait_for_each_other() {
  constexpr int kRanks = 20;
  for (int round = 0; round < 20; ++round) {
    const MeetingKey key = new_key();
    std::barrier<> collective(kRanks);
    std::latch end(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      meet(
          key, {Operation::kCombine, rank, kRanks, kLong}, 0, 1,
          [](std::span<const int* const>, int) {},
          [&](const std::string&) {
            collective.arrive_and_wait();
            end.count_down();
          });
    }
    end.wait();
  }
}

void check_that_the_missing_are_named() {
  constexpr std::pair<Operation, const char*> kOperations[] = {
      {Operation::kPlan, "plan"},
      {Operation::kDispatch, "dispatch"},
      {Operation::kCombine, "combine"},
      {Operation::kReverseCombine, "reverse combine"},
      {Operation::kReverseDispatch, "reverse dispatch"}};
  for (const auto& [operation, its_name] : kOperations) {
    const MeetingKey key = new_key();
    constexpr int kRanks = 6;
    Told told(kRanks);
    std::atomic<int> tasks = 0;
    const auto come = [&](int rank) {
      meet(
          key, {operation, rank, kRanks, 400ms}, rank, 1,
          [&](std::span<const int* const>, int) { ++tasks; }, told.done(rank));
    };
    for (const int rank : {4, 1, 0, 3}) come(rank);
    FaultReport report = take_faults();
    while (report.faults.empty()) {
      std::this_thread::sleep_for(1ms);
      report = take_faults();
    }
    const Fault& fault = report.faults.front();
    REQUIRE(report.faults.size() == 1 && report.dropped == 0);
    REQUIRE(fault.kind == FaultKind::kTimeout && fault.operation == operation);
    REQUIRE(fault.group == key.group && fault.rank == 4 && fault.peer == 2);
    REQUIRE(fault.expected == kRanks && fault.seen == 4 && fault.device == -1);
    for (const int rank : {5, 2}) come(rank);
    for (const std::string& error : told.wait()) {
      REQUIRE(
          names(error, std::string("jax_mok: ") + its_name + " waited 0.4 s for rank 2, 5 of 6"));
      REQUIRE(names(error, "4 came"));
    }
    REQUIRE(tasks == 0);

    // All have been told: nothing is left of the meeting, not even its failure.
    Told again(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      meet(
          key, {operation, rank, kRanks, kLong}, rank, 1,
          [&](std::span<const int* const>, int) { ++tasks; }, again.done(rank));
    }
    for (const std::string& error : again.wait()) REQUIRE(error.empty());
    REQUIRE(tasks == 1);
  }
}

void check_that_a_rank_that_comes_twice_is_refused() {
  const MeetingKey key = new_key();
  Told told(3), second(1);
  const auto come = [&](int rank, Done done) {
    meet(
        key, {Operation::kDispatch, rank, 3, kLong}, rank, 1,
        [](std::span<const int* const> seats, int) {
          for (int rank = 0; rank < 3; ++rank) REQUIRE(*seats[rank] == rank);
        },
        std::move(done));
  };
  come(1, told.done(1));
  come(1, second.done(0));
  REQUIRE(names(second.wait().front(), "as the same rank"));
  come(0, told.done(0));
  come(2, told.done(2));
  for (const std::string& error : told.wait()) REQUIRE(error.empty());
}

// The last rank comes just when the others give up: all succeed, or all fail alike.
void check_time_outs_that_race_with_arrivals() {
  constexpr int kRanks = 4;
  int failed = 0, succeeded = 0;
  std::mt19937 rng(1);
  for (int round = 0; round < 300; ++round) {
    const MeetingKey key = new_key();
    Told told(kRanks);
    std::atomic<int> tasks = 0;
    const auto delay = std::chrono::microseconds(rng() % 8000);
    const Seconds timeout = std::chrono::microseconds(1000 + rng() % 7000);
    run_ranks(kRanks, [&](int rank) {
      if (rank == 0) std::this_thread::sleep_for(delay);
      meet(
          key, {Operation::kCombine, rank, kRanks, timeout}, rank, kRanks,
          [&](std::span<const int* const>, int) { ++tasks; }, told.done(rank));
    });
    const std::vector<std::string> errors = told.wait();
    REQUIRE(std::ranges::count(errors, errors.front()) == kRanks);
    REQUIRE(tasks == (errors.front().empty() ? kRanks : 0));
    ++(errors.front().empty() ? succeeded : failed);
  }
  const FaultReport report = take_faults();
  REQUIRE(static_cast<int64_t>(report.faults.size()) + report.dropped == failed);
  REQUIRE(failed > 0 && succeeded > 0);
}

// A meeting is told of its time-out although an earlier one waits for longer.
void check_that_a_long_wait_hides_no_short_one() {
  const MeetingKey waiting = new_key();
  Told patient(2), hasty(1);
  const auto come = [](const MeetingKey& key, int rank, Seconds timeout, Done done) {
    meet(
        key, {Operation::kPlan, rank, 2, timeout}, 0, 1, [](std::span<const int* const>, int) {},
        std::move(done));
  };
  const auto begin = std::chrono::steady_clock::now();
  come(waiting, 0, kLong, patient.done(0));
  come(new_key(), 0, 20ms, hasty.done(0));
  REQUIRE(names(hasty.wait().front(), "waited 0.02 s for rank 1 of 2"));
  REQUIRE(std::chrono::steady_clock::now() - begin < kLong / 2);
  come(waiting, 1, kLong, patient.done(1));
  for (const std::string& error : patient.wait()) REQUIRE(error.empty());
  REQUIRE(take_faults().faults.size() == 1);
}

// Of many meetings to which a rank never came the oldest is forgotten, and no more than that: its
// late rank waits and is told of its own time-out, that of the next of the one there was.
void check_that_few_failures_are_kept() {
  std::vector<MeetingKey> keys(kFailuresKept + 1);
  std::ranges::generate(keys, new_key);
  const auto come = [](const MeetingKey& key, int rank, Seconds timeout, Done done) {
    meet(
        key, {Operation::kPlan, rank, 2, timeout}, 0, 1, [](std::span<const int* const>, int) {},
        std::move(done));
  };
  Told told(static_cast<int>(keys.size())), late(2);
  for (size_t i = 0; i < keys.size(); ++i) come(keys[i], 0, 10ms, told.done(static_cast<int>(i)));
  for (const std::string& error : told.wait()) REQUIRE(names(error, "waited 0.01 s for rank 1"));
  for (const int i : {1, 0}) come(keys[i], 1, 20ms, late.done(i));
  const std::vector<std::string> errors = late.wait();
  REQUIRE(names(errors[0], "waited 0.02 s for rank 0"));
  REQUIRE(names(errors[1], "waited 0.01 s for rank 1"));
  take_faults();
}

void check_that_records_are_bounded() {
  constexpr int kFaults = 1000, kThreads = 4;
  run_ranks(kThreads, [](int rank) {
    for (int fault = 0; fault < kFaults; ++fault) {
      record_fault({FaultKind::kExpertOutOfRange, Operation::kPlan, 0, rank, -1, 8, fault});
    }
  });
  const FaultReport report = take_faults();
  REQUIRE(report.faults.size() == 256 && report.dropped == kThreads * kFaults - 256);
  REQUIRE(take_faults().faults.empty());
}

// One rank's memory in a layer whose experts do nothing: tokens go there and come back.
struct Home {
  Home(const PlanShape& shape, std::mt19937& rng)
      : ids(shape.choices()),
        row_source(shape.max_rows()),
        pull_order(shape.max_rows()),
        tile_expert(shape.max_tiles()),
        expert_tile(shape.local_experts() + 1),
        expert_rows(shape.local_experts()),
        slot_rank(shape.choices()),
        slot_row(shape.choices()),
        counts(kPlanCounts),
        values(shape.tokens),
        ring(shape.max_rows()),
        slots(shape.choices(), -1) {
    for (int32_t& id : ids) id = static_cast<int32_t>(rng() % (shape.experts + 1)) - 1;
    for (int64_t& value : values) value = static_cast<int64_t>(rng());
  }

  PlanTables tables() {
    return {row_source.data(),  pull_order.data(), tile_expert.data(), expert_tile.data(),
            expert_rows.data(), slot_rank.data(),  slot_row.data(),    counts.data()};
  }
  PlanView plan() const {
    return {row_source.data(), pull_order.data(), slot_rank.data(), slot_row.data(), counts.data()};
  }

  std::vector<int32_t> ids, row_source, pull_order, tile_expert, expert_tile, expert_rows;
  std::vector<int32_t> slot_rank, slot_row, counts;
  std::vector<int64_t> values, ring, slots;
};

template <typename T>
std::byte* bytes_of(std::vector<T>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

// Plan, dispatch and combine of all ranks at the same time, as in the handlers of the custom calls:
// no two tasks touch the same memory.
void check_calls_in_parallel() {
  std::mt19937 rng(2);
  for (int round = 0; round < 60; ++round) {
    const int32_t ranks = 1 + rng() % 8;
    const PlanShape shape{.ranks = ranks,
                          .tokens = static_cast<int64_t>(rng() % 40),
                          .top_k = static_cast<int32_t>(1 + rng() % 4),
                          .experts = ranks * static_cast<int32_t>(1 + rng() % 3),
                          .tile_rows = 4,
                          .chunk_rows = 8};
    const bool dispatch_pushes = rng() % 2, combine_pushes = rng() % 2;
    const int64_t ring_rows = std::max((shape.max_rows() + 7) / 8 * 8, int64_t{8});
    const TransferShape tokens{
        ranks, shape.choices(), shape.top_k, shape.tile_rows, {ring_rows, shape.chunk_rows}, 8};
    std::vector<Home> homes;
    for (int32_t rank = 0; rank < ranks; ++rank) homes.emplace_back(shape, rng);
    const MeetingKey planning = new_key(), dispatching = new_key(), combining = new_key();
    Told told(ranks);
    const auto combine = [&](int rank) {
      Home& home = homes[rank];
      meet(
          combining, {Operation::kCombine, rank, ranks, kLong},
          CombineSeat{bytes_of(home.ring), bytes_of(home.slots), home.plan(), 0}, ranks,
          [=](CombineSeats seats, int task) {
            (combine_pushes ? combine_push : combine_pull)(tokens, seats, task);
          },
          told.done(rank));
    };
    const auto dispatch = [&](int rank) {
      Home& home = homes[rank];
      meet(
          dispatching, {Operation::kDispatch, rank, ranks, kLong},
          DispatchSeat{bytes_of(home.values), bytes_of(home.ring), home.plan(), 0}, ranks,
          [=](DispatchSeats seats, int task) {
            (dispatch_pushes ? dispatch_push : dispatch_pull)(tokens, seats, task);
          },
          [&combine, rank](const std::string&) { combine(rank); });
    };
    run_ranks(ranks, [&](int rank) {
      meet(
          planning, {Operation::kPlan, rank, ranks, kLong}, rank, 1,
          [&homes, shape](std::span<const int* const> seats, int) {
            std::vector<const int32_t*> routes;
            std::vector<RankTables> outputs;
            for (const int* seat : seats) {
              routes.push_back(homes[*seat].ids.data());
              outputs.push_back({*seat, homes[*seat].tables()});
            }
            build_plans(shape, routes, outputs);
          },
          [&dispatch, rank](const std::string&) { dispatch(rank); });
    });
    for (const std::string& error : told.wait()) REQUIRE(error.empty());
    for (const Home& home : homes) {
      for (int64_t choice = 0; choice < shape.choices(); ++choice) {
        const int64_t value = home.values[choice / shape.top_k];
        REQUIRE(home.slots[choice] == (home.ids[choice] < 0 ? -1 : value));
      }
    }
  }
}

}  // namespace

int main() {
  check_chains_of_meetings();
  check_that_those_told_may_wait_for_each_other();
  check_that_the_missing_are_named();
  check_that_a_rank_that_comes_twice_is_refused();
  check_time_outs_that_race_with_arrivals();
  check_that_a_long_wait_hides_no_short_one();
  check_that_few_failures_are_kept();
  check_that_records_are_bounded();
  check_calls_in_parallel();
  std::puts("meetings of ranks good");
}
