#pragma once

#include <functional>

namespace mok {

// Runs the task on an idle worker thread, or on a new one: never behind another task. Whoever
// completes a call goes on with the rest of that rank's program, which may wait for other ranks
// (an XLA collective does), so a pool of fixed size would dead-lock.
void run_on_worker(std::function<void()> task);

}  // namespace mok
