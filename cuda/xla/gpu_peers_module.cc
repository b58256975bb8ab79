// Hands the handlers of the CUDA platform with peers to Python. They are apart from `_cuda` because
// a JAX without the FFI's collectives extension refuses everything built with its headers.

#include <nanobind/nanobind.h>

#include "xla/gpu_peers_handlers.h"
#include "xla/python.h"

namespace nb = nanobind;

namespace mok {
namespace {

nb::dict registrations() {
  const auto stages = [](auto prepare, auto initialize, auto execute) {
    nb::dict all;
    all["prepare"] = capsule(prepare);
    all["initialize"] = capsule(initialize);
    all["execute"] = capsule(execute);
    return all;
  };
  nb::dict targets;
  targets["jax_mok_forward_peers"] =
      stages(MokForwardPeersPrepare, MokForwardPeersInitialize, MokForwardPeersExecute);
  targets["jax_mok_backward_peers"] =
      stages(MokBackwardPeersPrepare, MokBackwardPeersInitialize, MokBackwardPeersExecute);
  targets["jax_mok_plan_peers"] =
      stages(MokPlanPeersPrepare, MokPlanPeersInitialize, MokPlanPeersExecute);
  return targets;
}

NB_MODULE(_cuda_peers, module) { module.def("registrations", &registrations); }

}  // namespace
}  // namespace mok
