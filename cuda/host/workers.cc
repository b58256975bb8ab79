#include "host/workers.h"

#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <queue>
#include <system_error>
#include <thread>
#include <utility>

namespace mok {
namespace {

class Workers {
 public:
  void run(std::function<void()> task) {
    // Rounding and the treatment of subnormals are the caller's: results are compared bit for bit.
    std::fenv_t environment;
    std::fegetenv(&environment);
    const std::lock_guard lock(mutex_);
    // First the worker: a task that nobody takes must not be left to a later one.
    if (idle_ <= tasks_.size()) {
      add_worker();
    }
    tasks_.push([task = std::move(task), environment] {
      std::fesetenv(&environment);
      task();
    });
    wake_.notify_one();
  }

 private:
  // A thread counts as idle from its birth on: it may get a core only after more tasks have come.
  void add_worker() {
    try {
      std::thread([this] { work(); }).detach();
      ++idle_;
      ++workers_;
    } catch (const std::system_error&) {
      // The machine gives no more threads: the task waits for a worker, if there is any.
      if (workers_ == 0) {
        throw;
      }
    }
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return !tasks_.empty(); });
      --idle_;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      ++idle_;
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::queue<std::function<void()>> tasks_;
  size_t idle_ = 0;
  size_t workers_ = 0;
};

}  // namespace

void run_on_worker(std::function<void()> task) {
  // Never destroyed: its threads outlive main().
  static Workers* const workers = new Workers;
  workers->run(std::move(task));
}

}  // namespace mok
