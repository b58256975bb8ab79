// Hands the handlers of the CUDA platform without peers to Python, and what Python asks about GPUs
// and sizes.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "call/backward.h"
#include "call/device.h"
#include "call/forward_workspace.h"
#include "call/plan.h"
#include "call/timeline.h"
#ifdef JAX_MOK_INJECT_FAULTS
#include "call/inject.h"
#endif
#include "xla/gpu_handlers.h"
#include "xla/python.h"

namespace nb = nanobind;

namespace mok {
namespace {

nb::dict registrations() {
  const auto stages = [](auto execute) {
    nb::dict all;
    all["initialize"] = capsule(MokDeviceInitialize);
    all["execute"] = capsule(execute);
    return all;
  };
  nb::dict targets;
  targets["jax_mok_forward_alone"] = stages(MokForwardAlone);
  targets["jax_mok_backward_alone"] = stages(MokBackwardAlone);
  targets["jax_mok_plan_alone"] = stages(MokPlanAlone);
  targets["jax_mok_plan_of_gathered_routes"] = stages(MokPlanOfGatheredRoutesOnGpu);
  targets["jax_mok_weighted_sum"] = stages(MokWeightedSumOnGpu);
  targets["jax_mok_quantize"] = stages(MokQuantizeOnGpu);
  targets["jax_mok_dequantize"] = stages(MokDequantizeOnGpu);
  targets["jax_mok_round"] = stages(MokRoundOnGpu);
  return targets;
}

// Binds a function of the sizes of a forward call.
template <typename Function>
void def_of_shape(nb::module_& module, const char* name, Function function) {
  module.def(
      name,
      [function](int32_t ranks, int64_t tokens, int32_t top_k, int32_t experts, int32_t tile_rows,
                 int64_t chunk_rows, int64_t ring_rows, int64_t hidden, int64_t inner,
                 bool dispatch_push, bool combine_push, bool reverse_combine_push,
                 bool reverse_dispatch_push, bool composed, bool keeps_plan, bool mxfp8) {
        return function(sm90::make_forward_shape(
            {ranks, tokens, top_k, experts, tile_rows, chunk_rows},
            {dispatch_push, combine_push, reverse_combine_push, reverse_dispatch_push}, composed,
            keeps_plan, ring_rows, hidden, inner, mxfp8));
      },
      nb::arg("ranks"), nb::arg("tokens"), nb::arg("top_k"), nb::arg("experts"),
      nb::arg("tile_rows"), nb::arg("chunk_rows"), nb::arg("ring_rows"), nb::arg("hidden"),
      nb::arg("inner"), nb::arg("dispatch_push"), nb::arg("combine_push"),
      nb::arg("reverse_combine_push"), nb::arg("reverse_dispatch_push"), nb::arg("composed"),
      nb::arg("keeps_plan"), nb::arg("mxfp8"));
}

int64_t arena_bytes(const sm90::ForwardShape& shape) {
  return shape.has_peers() ? shape.arena_layout().bytes() : 0;
}

int64_t workspace_bytes(const sm90::ForwardShape& shape) {
  return sm90::lay_out(shape, nullptr).bytes;
}

// Likewise of a backward call.
template <typename Function>
void def_of_backward(nb::module_& module, const char* name, Function function) {
  module.def(
      name,
      [function](int32_t ranks, int64_t tokens, int32_t top_k, int32_t experts, int32_t tile_rows,
                 int64_t chunk_rows, int64_t ring_rows, int64_t saved_rows, int64_t hidden,
                 int64_t inner, bool dispatch_push, bool combine_push, bool reverse_combine_push,
                 bool reverse_dispatch_push, bool composed, bool mxfp8) {
        return function(BackwardSizes{
            {ranks, tokens, top_k, experts, tile_rows, chunk_rows},
            {dispatch_push, combine_push, reverse_combine_push, reverse_dispatch_push},
            composed,
            ring_rows,
            saved_rows,
            hidden,
            inner,
            mxfp8});
      },
      nb::arg("ranks"), nb::arg("tokens"), nb::arg("top_k"), nb::arg("experts"),
      nb::arg("tile_rows"), nb::arg("chunk_rows"), nb::arg("ring_rows"), nb::arg("saved_rows"),
      nb::arg("hidden"), nb::arg("inner"), nb::arg("dispatch_push"), nb::arg("combine_push"),
      nb::arg("reverse_combine_push"), nb::arg("reverse_dispatch_push"), nb::arg("composed"),
      nb::arg("mxfp8"));
}

int64_t backward_arena_bytes(const BackwardSizes& sizes) {
  return sizes.has_peers() ? sizes.arena_layout().bytes() : 0;
}

int64_t backward_workspace_bytes(const BackwardSizes& sizes) {
  return lay_out(sizes, nullptr).bytes;
}

int64_t plan_workspace_bytes(int32_t ranks, int64_t tokens, int32_t top_k, int32_t experts,
                             int32_t tile_rows, int64_t chunk_rows) {
  return mok::plan_workspace_bytes({ranks, tokens, top_k, experts, tile_rows, chunk_rows});
}

nb::list take_faults() {
  nb::list list;
  for (const Fault& fault : take_gpu_faults()) {
    list.append(fault_dict(fault));
  }
  return list;
}

nb::bytes take_timeline_bytes(int32_t device) {
  std::vector<TimelineRecord> records;
  if (const std::string problem = take_timeline(device, &records); !problem.empty()) {
    throw std::runtime_error(problem);
  }
  return nb::bytes(records.data(), sizeof(TimelineRecord) * records.size());
}

bool plan_fits(int32_t ranks, int64_t tokens, int32_t top_k, int32_t experts, int32_t tile_rows,
               int64_t chunk_rows) {
  return plan_call_fits({ranks, tokens, top_k, experts, tile_rows, chunk_rows});
}

NB_MODULE(_cuda, module) {
  module.def("registrations", &registrations);
  module.def("take_faults", &take_faults);
  module.def("start_timeline", &start_timeline, nb::arg("device"));
  module.def("take_timeline", &take_timeline_bytes, nb::arg("device"));
  module.def("launched_calls", &launched_calls);
  module.def("can_reach", &can_reach, nb::arg("device"), nb::arg("peer"));
  module.def("plan_fits", &plan_fits, nb::arg("ranks"), nb::arg("tokens"), nb::arg("top_k"),
             nb::arg("experts"), nb::arg("tile_rows"), nb::arg("chunk_rows"));
  module.def("plan_workspace_bytes", &plan_workspace_bytes, nb::arg("ranks"), nb::arg("tokens"),
             nb::arg("top_k"), nb::arg("experts"), nb::arg("tile_rows"), nb::arg("chunk_rows"));
#ifdef JAX_MOK_INJECT_FAULTS
  module.def(
      "start_injection",
      [](int32_t device, int32_t rank, const std::string& hook, uint32_t first, uint32_t count,
         uint64_t delay_ns, bool drops) {
        return start_injection(
            device, hook,
            {.rank = rank, .first = first, .count = count, .delay_ns = delay_ns, .drops = drops});
      },
      nb::arg("device"), nb::arg("rank"), nb::arg("hook"), nb::arg("first"), nb::arg("count"),
      nb::arg("delay_ns"), nb::arg("drops"));
  module.def("end_injection", &end_injection, nb::arg("device"));
#endif
  def_of_backward(module, "backward_arena_bytes", backward_arena_bytes);
  def_of_backward(module, "backward_workspace_bytes", backward_workspace_bytes);
  def_of_shape(module, "arena_bytes", arena_bytes);
  def_of_shape(module, "workspace_bytes", workspace_bytes);
}

}  // namespace
}  // namespace mok
