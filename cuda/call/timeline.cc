#include "call/timeline.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "call/device.h"
#include "call/on_device.h"
#include "sm90/tile.h"

namespace mok {
namespace {

constexpr uint32_t kCapacity = 4096;

struct Kept {
  Timeline memory{};  // taken once and never given back: graphs may hold its address
  bool is_on = false;
};

std::mutex mutex;
std::map<int32_t, Kept>& all_kept() {
  static auto* const all = new std::map<int32_t, Kept>;
  return *all;
}

int64_t lanes_of(int32_t ordinal) {
  const Device device = device_of(ordinal);
  return int64_t{std::max(device.clusters, device.backward_clusters)} * sm90::kCluster *
         kTimelineRoles;
}

cudaError_t take_memory(int64_t lanes, Timeline* memory) {
  memory->capacity = kCapacity;
  cudaError_t error = cudaSuccess;
  if (memory->counts == nullptr) {
    error = cudaMalloc(reinterpret_cast<void**>(&memory->counts), sizeof(uint32_t) * lanes);
  }
  if (error == cudaSuccess) {
    error = cudaMalloc(reinterpret_cast<void**>(&memory->entries),
                       sizeof(TimelineEntry) * lanes * kCapacity);
  }
  return error;
}

}  // namespace

std::string start_timeline(int32_t ordinal) {
  if (!is_prepared(ordinal)) {
    return "GPU " + std::to_string(ordinal) + " has run no call yet";
  }
  const std::lock_guard lock(mutex);
  Kept& kept = all_kept()[ordinal];
  const int64_t lanes = lanes_of(ordinal);
  const OnDevice on_device(ordinal);
  cudaError_t error = on_device.error();
  if (error == cudaSuccess && kept.memory.entries == nullptr) {
    error = take_memory(lanes, &kept.memory);
  }
  if (error == cudaSuccess) {
    error = cudaMemset(kept.memory.counts, 0, sizeof(uint32_t) * lanes);
  }
  kept.is_on = error == cudaSuccess;
  return kept.is_on ? "" : std::string("a timeline: ") + cudaGetErrorString(error);
}

std::string take_timeline(int32_t ordinal, std::vector<TimelineRecord>* records) {
  const Timeline memory = timeline_of(ordinal);
  if (memory.entries == nullptr) {
    return "no timeline of GPU " + std::to_string(ordinal) + " was started";
  }
  {  // not while waiting for the GPU, whose kernel may wait for another one's call to be launched
    const std::lock_guard lock(mutex);
    all_kept()[ordinal].is_on = false;
  }
  std::vector<uint32_t> counts(lanes_of(ordinal));
  std::vector<TimelineEntry> entries(kCapacity);
  const OnDevice on_device(ordinal);
  cudaError_t error = on_device.error();
  const auto fetch = [&error](auto& to, const auto* from, size_t count) {
    if (error == cudaSuccess) {
      error = cudaMemcpy(to.data(), from, sizeof(*from) * count, cudaMemcpyDeviceToHost);
    }
  };
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  fetch(counts, memory.counts, counts.size());
  for (size_t lane = 0; lane < counts.size(); ++lane) {
    fetch(entries, memory.entries + lane * kCapacity, counts[lane]);
    for (size_t i = 0; i < counts[lane]; ++i) {
      records->push_back({entries[i], static_cast<int32_t>(lane / kTimelineRoles),
                          static_cast<TimelineRole>(lane % kTimelineRoles)});
    }
  }
  if (error != cudaSuccess) {
    return std::string("a timeline: ") + cudaGetErrorString(error);
  }
  return std::ranges::find(counts, kCapacity) == counts.end()
             ? ""
             : "a block made the " + std::to_string(kCapacity) +
                   " entries that a timeline has room for, or more: measure a smaller shape";
}

Timeline timeline_of(int32_t ordinal) {
  const std::lock_guard lock(mutex);
  const auto kept = all_kept().find(ordinal);
  return kept != all_kept().end() && kept->second.is_on ? kept->second.memory : Timeline{};
}

}  // namespace mok
