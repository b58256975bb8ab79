// Hands the handlers of the CUDA platform to Python.

#include <nanobind/nanobind.h>

#include "xla/gpu_forward.h"
#include "xla/python.h"
#include "xla/workspace.h"

namespace nb = nanobind;

namespace mok {
namespace {

nb::dict registrations() {
  nb::dict alone;
  alone["initialize"] = capsule(MokForwardAloneInitialize);
  alone["execute"] = capsule(MokForwardAloneExecute);
  nb::dict peers;
  peers["prepare"] = capsule(MokForwardPeersPrepare);
  peers["initialize"] = capsule(MokForwardPeersInitialize);
  peers["execute"] = capsule(MokForwardPeersExecute);
  nb::dict targets;
  targets["jax_mok_forward_alone"] = alone;
  targets["jax_mok_forward_peers"] = peers;
  return targets;
}

int64_t workspace_bytes(int32_t ranks, int64_t tokens, int32_t top_k, int32_t experts,
                        int32_t tile_rows, int64_t chunk_rows, int64_t ring_rows, int64_t hidden,
                        int64_t inner) {
  const PlanShape plan{ranks, tokens, top_k, experts, tile_rows, chunk_rows};
  return sm90::lay_out(sm90::make_forward_shape(plan, ring_rows, hidden, inner), nullptr).bytes;
}

nb::list take_faults() {
  nb::list list;
  for (const Fault& fault : take_gpu_faults()) {
    list.append(fault_dict(fault));
  }
  return list;
}

bool plan_fits(int32_t ranks, int64_t tokens, int32_t top_k, int32_t experts, int32_t tile_rows,
               int64_t chunk_rows) {
  return sm90::plan_fits({ranks, tokens, top_k, experts, tile_rows, chunk_rows});
}

NB_MODULE(_cuda, module) {
  module.def("registrations", &registrations);
  module.def("take_faults", &take_faults);
  module.def("plan_fits", &plan_fits, nb::arg("ranks"), nb::arg("tokens"), nb::arg("top_k"),
             nb::arg("experts"), nb::arg("tile_rows"), nb::arg("chunk_rows"));
  module.def("workspace_bytes", &workspace_bytes, nb::arg("ranks"), nb::arg("tokens"),
             nb::arg("top_k"), nb::arg("experts"), nb::arg("tile_rows"), nb::arg("chunk_rows"),
             nb::arg("ring_rows"), nb::arg("hidden"), nb::arg("inner"));
}

}  // namespace
}  // namespace mok
