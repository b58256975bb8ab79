#include "sm90/forward.h"
#include "sm90/forward_load.cuh"
#include "sm90/forward_multiplier.cuh"
#include "sm90/forward_schedule.cuh"
#include "sm90/persistent.cuh"
#include "sm90/pull.cuh"

namespace mok::sm90 {
namespace {

struct ForwardRoles {
  using Params = ForwardParams;
  using Scheduler = ForwardScheduler;
  using Loader = ForwardLoader;
  using Multiplier = ForwardMultiplier;

  __device__ static void pull(const ForwardParams& params, int warp, int warps) {
    pull_tokens(params, warp, warps, [&](const char* base, int64_t from, int64_t to) {
      copy_row(reinterpret_cast<const Bits16*>(base + params.x_offset) + from, params.received + to,
               params.hidden);
    });
  }
};

}  // namespace

cudaError_t prepare_forward(int* clusters) { return prepare<ForwardRoles>(clusters); }

cudaError_t launch_forward(const ForwardParams& params, int clusters, cudaStream_t stream) {
  return launch<ForwardRoles>(params, clusters, stream);
}

}  // namespace mok::sm90
