#include "sm90/backward.h"
#include "sm90/backward_load.cuh"
#include "sm90/backward_multiplier.cuh"
#include "sm90/backward_schedule.cuh"
#include "sm90/persistent.cuh"
#include "sm90/pull.cuh"

namespace mok::sm90 {
namespace {

struct BackwardRoles {
  using Params = BackwardParams;
  using Scheduler = BackwardScheduler;
  using Loader = BackwardLoader;
  using Multiplier = BackwardMultiplier;

  // The output's gradient first: it is needed first.
  __device__ static void pull(const BackwardParams& params, int warp, int warps) {
    if (*params.skip != 0) {
      return;
    }
    pull_tokens(params, warp, warps, [&](const char* base, int64_t from, int64_t to) {
      if (params.pulls_dy) {
        copy_row(reinterpret_cast<const Bits16*>(base + params.dy_offset) + from,
                 params.received_dy + to, params.hidden);
      }
      if (params.pulls_x) {
        copy_row(reinterpret_cast<const Bits16*>(base + params.x_offset) + from,
                 params.received_x + to, params.hidden);
      }
    });
  }
};

}  // namespace

cudaError_t prepare_backward(int* clusters) { return prepare<BackwardRoles>(clusters); }

cudaError_t launch_backward(const BackwardParams& params, int clusters, cudaStream_t stream) {
  return launch<BackwardRoles>(params, clusters, stream);
}

}  // namespace mok::sm90
