#include "call/inject.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <vector>

#include "call/on_device.h"
#include "device/injection_setters.h"

namespace mok {
namespace {

struct NamedHook {
  const char* name;
  Hook hook;
  bool can_drop;
};

constexpr std::array<NamedHook, 10> kHooks{{
    {"flag", Hook::kFlag, true},
    {"set_up_flag", Hook::kSetUpFlag, true},
    {"push_choices", Hook::kPushChoices, true},
    {"push_token", Hook::kPushToken, true},
    {"push_row", Hook::kPushRow, true},
    {"push_number", Hook::kPushNumber, true},
    {"pull_token", Hook::kPullToken, true},
    {"pull_wave_token", Hook::kPullWaveToken, false},
    {"pull_row", Hook::kPullRow, false},
    {"pull_number", Hook::kPullNumber, false},
}};

std::mutex mutex;

std::vector<inject::Setter>& setters() {
  static auto* const all = new std::vector<inject::Setter>;
  return *all;
}

// Of each device, taken once and never given back.
std::map<int32_t, Injection*>& injections() {
  static auto* const all = new std::map<int32_t, Injection*>;
  return *all;
}

cudaError_t set_everywhere(Injection* injection) {
  cudaError_t error = cudaSuccess;
  for (const inject::Setter setter : setters()) {
    if (error == cudaSuccess) error = setter(injection);
  }
  return error;
}

}  // namespace

std::string start_injection(int32_t ordinal, const std::string& hook, Injection injection) {
  const auto named =
      std::ranges::find_if(kHooks, [&](const NamedHook& each) { return hook == each.name; });
  if (named == kHooks.end() || (injection.drops && !named->can_drop)) {
    return "there is no hook that can do so: " + hook;
  }
  injection.hook = named->hook;
  const std::lock_guard lock(mutex);
  Injection*& memory = injections()[ordinal];
  const OnDevice device(ordinal);
  cudaError_t error = device.error();
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess && memory == nullptr) {
    error = cudaMalloc(reinterpret_cast<void**>(&memory), sizeof(injection));
  }
  if (error == cudaSuccess) {
    error = cudaMemcpy(memory, &injection, sizeof(injection), cudaMemcpyHostToDevice);
  }
  if (error == cudaSuccess) error = set_everywhere(memory);
  return error == cudaSuccess ? "" : std::string("injecting: ") + cudaGetErrorString(error);
}

uint32_t end_injection(int32_t ordinal) {
  const std::lock_guard lock(mutex);
  Injection injection{};
  const OnDevice device(ordinal);
  if (device.error() == cudaSuccess && injections().contains(ordinal) &&
      cudaDeviceSynchronize() == cudaSuccess && set_everywhere(nullptr) == cudaSuccess) {
    cudaMemcpy(&injection, injections()[ordinal], sizeof(injection), cudaMemcpyDeviceToHost);
  }
  return injection.happened;
}

bool inject::list_setter(Setter setter) {
  setters().push_back(setter);
  return true;
}

}  // namespace mok
