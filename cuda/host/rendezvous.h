#pragma once

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/fault.h"

// How the ranks of one process meet: each brings a seat (its buffers) and leaves at once; when all
// have come, the work is done on worker threads and every rank is told. No thread waits.
namespace mok {

// Which meeting: one call site of one program, in one execution, for one group of ranks.
struct MeetingKey {
  int64_t site;
  int64_t run;
  int32_t group;
  auto operator<=>(const MeetingKey&) const = default;
};

struct Attendance {
  Operation operation;
  int32_t rank;
  int32_t ranks;
  std::chrono::duration<double> timeout;
};

// Called once per rank; an empty text means success.
using Done = std::function<void(const std::string& error)>;

using Seats = std::span<const std::shared_ptr<const void>>;
using Work = std::function<void(Seats seats, int task)>;

// Time-outs that are remembered for ranks that come late, which then need not wait. A rank that
// died comes to none of them, so the oldest is forgotten for another: whoever comes later still
// waits for those who were there, in vain, and gets an error as well.
constexpr size_t kFailuresKept = 256;

// The last rank to come starts `tasks` parallel tasks. If somebody is missing when the time-out of
// the first to come expires, a fault is recorded and those who came get an error, as does whoever
// comes later.
void meet_untyped(const MeetingKey& key, const Attendance& attendance,
                  std::shared_ptr<const void> seat, int tasks, Work work, Done done);

// The same with typed seats; `work(seats, task)`.
template <typename Seat, typename TypedWork>
void meet(const MeetingKey& key, const Attendance& attendance, Seat seat, int tasks, TypedWork work,
          Done done) {
  meet_untyped(
      key, attendance, std::make_shared<const Seat>(std::move(seat)), tasks,
      [work](Seats erased, int task) {
        std::vector<const Seat*> seats;
        for (const auto& pointer : erased) {
          seats.push_back(static_cast<const Seat*>(pointer.get()));
        }
        work(std::span<const Seat* const>(seats), task);
      },
      std::move(done));
}

}  // namespace mok
