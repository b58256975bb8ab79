#include "host/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "host/faults.h"
#include "host/workers.h"

namespace mok {
namespace {

using Clock = std::chrono::steady_clock;

struct Meeting {
  Attendance first;
  Clock::time_point deadline;
  int32_t arrived = 0;
  std::vector<std::shared_ptr<const void>> seats;
  std::vector<Done> done;
};

// A meeting that timed out, for those who come late.
struct Failure {
  MeetingKey key;
  std::string error;
  size_t absent;
};

void complete(std::shared_ptr<Meeting> meeting, const std::string& error) {
  for (const Done& done : meeting->done) {
    if (!done) {
      continue;
    }
    try {
      run_on_worker([done, error] { done(error); });
    } catch (const std::system_error&) {
      done(error);  // there is not a single worker
    }
  }
}

void start(std::shared_ptr<Meeting> meeting, int tasks, const Work& work) {
  const auto remaining = std::make_shared<std::atomic<int>>(tasks);
  try {
    for (int task = 0; task < tasks; ++task) {
      run_on_worker([meeting, remaining, work, task] {
        work(meeting->seats, task);
        if (remaining->fetch_sub(1) == 1) {
          complete(meeting, "");
        }
      });
    }
  } catch (const std::system_error& error) {
    // There is not a single worker, so no task has begun.
    for (const Done& done : meeting->done) {
      done(std::string("jax_mok: the machine gives no threads: ") + error.what());
    }
  }
}

std::vector<int32_t> missing_ranks(const Meeting& meeting) {
  std::vector<int32_t> missing;
  for (int32_t rank = 0; rank < meeting.first.ranks; ++rank) {
    if (!meeting.done[rank]) {
      missing.push_back(rank);
    }
  }
  return missing;
}

std::string describe_missing(const Meeting& meeting, const std::vector<int32_t>& missing) {
  std::ostringstream text;
  text << "jax_mok: " << name(meeting.first.operation) << " waited "
       << meeting.first.timeout.count() << " s for rank";
  for (size_t i = 0; i < missing.size(); ++i) {
    text << (i ? ", " : " ") << missing[i];
  }
  text << " of " << meeting.first.ranks << "; " << meeting.arrived
       << " came. Every rank must make the call: is it in one branch of a lax.cond, or in loops of "
          "unequal length? On CPU devices JAX stands still, too, with more than some thirty "
          "computations under way: wait for a result now and then. If the machine is only slow, "
          "raise MoEConfig.timeout_s. All ranks must "
          "be devices of one process, too (MoEConfig.composition='auto' sees to that).";
  return text.str();
}

class Room {
 public:
  void join(const MeetingKey& key, const Attendance& attendance, std::shared_ptr<const void> seat,
            int tasks, const Work& work, Done done) {
    std::unique_lock lock(mutex_);
    if (const auto late = std::ranges::find(failed_, key, &Failure::key); late != failed_.end()) {
      const std::string error = late->error;
      if (--late->absent == 0) {
        failed_.erase(late);
      }
      lock.unlock();
      done(error);
      return;
    }
    std::shared_ptr<Meeting>& slot = meetings_[key];
    if (!slot) {
      slot = open(key, attendance);
    }
    const std::shared_ptr<Meeting> meeting = slot;
    if (meeting->done[attendance.rank]) {
      lock.unlock();
      done(
          "jax_mok: two devices came to one meeting as the same rank; every mesh axis must be "
          "manual in the shard_map around the layer");
      return;
    }
    meeting->seats[attendance.rank] = std::move(seat);
    meeting->done[attendance.rank] = std::move(done);
    if (++meeting->arrived == attendance.ranks) {
      deadlines_.erase({meeting->deadline, key});
      meetings_.erase(key);
      lock.unlock();
      start(meeting, tasks, work);
    }
  }

 private:
  std::shared_ptr<Meeting> open(const MeetingKey& key, const Attendance& attendance) {
    auto meeting = std::make_shared<Meeting>();
    meeting->first = attendance;
    meeting->deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(attendance.timeout);
    meeting->seats.resize(attendance.ranks);
    meeting->done.resize(attendance.ranks);
    deadlines_[{meeting->deadline, key}] = meeting;
    if (!watching_) {
      try {
        std::thread([this] { watch(); }).detach();
        watching_ = true;
      } catch (const std::system_error&) {
        // The next meeting tries again; until then no time-out is noticed.
      }
    }
    if (deadlines_.begin()->second == meeting) {
      earlier_deadline_.notify_one();
    }
    return meeting;
  }

  void watch() {
    std::unique_lock lock(mutex_);
    while (true) {
      if (deadlines_.empty()) {
        earlier_deadline_.wait(lock);
        continue;
      }
      const auto next = deadlines_.begin();
      if (Clock::now() < next->first.first) {
        const Clock::time_point deadline = next->first.first;
        earlier_deadline_.wait_until(lock, deadline);
        continue;
      }
      const MeetingKey key = next->first.second;
      const std::shared_ptr<Meeting> meeting = next->second;
      meetings_.erase(key);
      deadlines_.erase(next);
      const std::vector<int32_t> missing = missing_ranks(*meeting);
      const std::string error = describe_missing(*meeting, missing);
      if (failed_.size() == kFailuresKept) {
        failed_.pop_front();
      }
      failed_.push_back({key, error, missing.size()});
      record_fault({FaultKind::kTimeout, meeting->first.operation, key.group, meeting->first.rank,
                    missing.front(), meeting->first.ranks, meeting->arrived});
      lock.unlock();
      complete(meeting, error);
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable earlier_deadline_;
  std::map<MeetingKey, std::shared_ptr<Meeting>> meetings_;
  std::map<std::pair<Clock::time_point, MeetingKey>, std::shared_ptr<Meeting>> deadlines_;
  std::deque<Failure> failed_;  // the oldest first; nearly always there is none
  bool watching_ = false;
};

}  // namespace

void meet_untyped(const MeetingKey& key, const Attendance& attendance,
                  std::shared_ptr<const void> seat, int tasks, Work work, Done done) {
  // Never destroyed: its watching thread outlives main().
  static Room* const room = new Room;
  room->join(key, attendance, std::move(seat), tasks, work, std::move(done));
}

}  // namespace mok
