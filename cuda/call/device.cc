#include "call/device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "link/exchange.h"
#include "sm90/backward.h"
#include "sm90/backward_list.h"
#include "sm90/backward_moves.h"
#include "sm90/choices.h"
#include "sm90/finish.h"
#include "sm90/forward.h"
#include "sm90/move_rows.h"
#include "sm90/mx.h"
#include "sm90/plan.h"
#include "sm90/round_rows.h"
#include "sm90/weighted_sum.h"
#include "sm90/work_list.h"

namespace mok {
namespace {

using namespace mok::sm90;

std::mutex mutex;
std::map<int32_t, Device>& devices() {
  static auto* const all = new std::map<int32_t, Device>;
  return *all;
}

}  // namespace

std::string prepare_device(int32_t ordinal) {
  const std::lock_guard lock(mutex);
  if (devices().contains(ordinal)) {
    return "";
  }
  Device device;
  cudaError_t error = cudaSetDevice(ordinal);
  int major = 0, minor = 0;
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  }
  if (error == cudaSuccess && (major != 9 || minor != 0)) {
    return "GPU " + std::to_string(ordinal) + " has compute capability " + std::to_string(major) +
           "." + std::to_string(minor) + "; the kernels need 9.0 (H100, H200)";
  }
  if (error == cudaSuccess) error = prepare_plan();
  int mx_clusters = 0, mx_backward_clusters = 0;
  if (error == cudaSuccess) error = prepare_forward(&device.clusters);
  if (error == cudaSuccess) error = prepare_mx_forward(&mx_clusters);
  if (error == cudaSuccess) error = prepare_backward(&device.backward_clusters);
  if (error == cudaSuccess) error = prepare_mx_backward(&mx_backward_clusters);
  // The same in both precisions, since all are blocks that fill an SM.
  device.clusters = std::min(device.clusters, mx_clusters);
  device.backward_clusters = std::min(device.backward_clusters, mx_backward_clusters);
  for (const auto load :
       {load_backward_list, load_backward_moves, load_choices, load_exchange, load_finish,
        load_move_rows, load_mx, load_round_rows, load_weighted_sum, load_work_list}) {
    if (error == cudaSuccess) error = load();
  }
  if (error == cudaSuccess) {
    error = cudaHostAlloc(reinterpret_cast<void**>(&device.record), sizeof(CallRecord),
                          cudaHostAllocMapped);
  }
  if (error == cudaSuccess) {
    *device.record = {};
    devices()[ordinal] = device;
    return "";
  }
  return std::string("preparing a GPU: ") + cudaGetErrorString(error);
}

bool can_reach(int32_t ordinal, int32_t peer) {
  int answer = 0;
  if (cudaDeviceCanAccessPeer(&answer, ordinal, peer) != cudaSuccess) {
    cudaGetLastError();  // not that of a later launch
    return true;
  }
  return answer != 0;
}

bool is_prepared(int32_t ordinal) {
  const std::lock_guard lock(mutex);
  return devices().contains(ordinal);
}

Device device_of(int32_t ordinal) {
  const std::lock_guard lock(mutex);
  return devices().at(ordinal);
}

namespace {
std::atomic<int64_t> calls{0};
}  // namespace

void count_launched_call() { ++calls; }
int64_t launched_calls() { return calls; }

std::vector<Fault> take_gpu_faults() {
  const std::lock_guard lock(mutex);
  std::vector<Fault> faults;
  for (auto& [ordinal, device] : devices()) {
    CallRecord now;
    std::memcpy(&now, device.record, sizeof(now));
    if (now.link_timeouts != device.told.link_timeouts) {
      faults.push_back({now.is_other_call ? FaultKind::kOtherCall : FaultKind::kTimeout,
                        Operation::kMeeting, /*group=*/0, now.rank, now.peer,
                        static_cast<int64_t>(now.expected), static_cast<int64_t>(now.seen),
                        ordinal});
    }
    if (now.kernel_timeouts != device.told.kernel_timeouts) {
      faults.push_back({FaultKind::kKernelTimeout, Operation::kKernel, /*group=*/0, /*rank=*/-1,
                        /*peer=*/-1, 0, now.kernel_timeouts - device.told.kernel_timeouts,
                        ordinal});
    }
    if (now.out_of_range != device.told.out_of_range) {
      faults.push_back({FaultKind::kExpertOutOfRange, Operation::kPlan, /*group=*/0, /*rank=*/-1,
                        /*peer=*/-1, now.experts, now.out_of_range - device.told.out_of_range,
                        ordinal});
    }
    device.told = now;
  }
  return faults;
}

}  // namespace mok
