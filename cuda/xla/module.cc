// Hands the handlers of the CPU platform and the fault records to Python, and the plan builder and
// ring arithmetic to tests that need no XLA program; and the simulation of a rack.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

#include "core/ring.h"
#include "host/faults.h"
#include "host/plan_builder.h"
#include "xla/cpu_handlers.h"
#include "xla/python.h"
#include "xla/rack_module.h"

namespace nb = nanobind;

namespace mok {
namespace {

nb::dict registrations() {
  const auto execute = [](auto handler) {
    nb::dict stages;
    stages["execute"] = capsule(handler);
    return stages;
  };
  const auto meeting = [&](auto handler) {
    nb::dict stages = execute(handler);
    stages["instantiate"] = capsule(MokCallSite);
    return stages;
  };
  nb::dict targets;
  targets["jax_mok_plan"] = meeting(MokPlan);
  targets["jax_mok_plan_of_gathered_routes"] = execute(MokPlanOfGatheredRoutes);
  targets["jax_mok_dispatch"] = meeting(MokDispatch);
  targets["jax_mok_combine"] = meeting(MokCombine);
  targets["jax_mok_weighted_sum"] = execute(MokWeightedSum);
  targets["jax_mok_quantize"] = execute(MokQuantize);
  targets["jax_mok_dequantize"] = execute(MokDequantize);
  targets["jax_mok_round"] = execute(MokRound);
  return targets;
}

nb::tuple faults() {
  const FaultReport report = take_faults();
  nb::list list;
  for (const Fault& fault : report.faults) {
    list.append(fault_dict(fault));
  }
  return nb::make_tuple(list, report.dropped);
}

using Int32Array = nb::ndarray<nb::numpy, int32_t>;
using Routes = nb::ndarray<const int32_t, nb::shape<-1, -1, -1>, nb::c_contig, nb::device::cpu>;

Int32Array array(const std::vector<int32_t>& values) {
  auto* data = new std::vector<int32_t>(values);
  nb::capsule owner(
      data, [](void* pointer) noexcept { delete static_cast<std::vector<int32_t>*>(pointer); });
  return Int32Array(data->data(), {data->size()}, owner);
}

nb::dict build_plan(Routes routes, int32_t rank, int32_t experts, int32_t tile_rows,
                    int64_t chunk_rows) {
  const PlanShape shape{static_cast<int32_t>(routes.shape(0)),
                        static_cast<int64_t>(routes.shape(1)),
                        static_cast<int32_t>(routes.shape(2)),
                        experts,
                        tile_rows,
                        chunk_rows};
  if (shape.ranks < 1 || experts < 1 || experts % shape.ranks || rank < 0 || rank >= shape.ranks ||
      tile_rows < 1 || chunk_rows < tile_rows || chunk_rows % tile_rows) {
    throw nb::value_error("build_plan: inconsistent ranks, experts, tile_rows or chunk_rows");
  }
  std::vector<int32_t> row_source(shape.max_rows()), pull_order(shape.max_rows()),
      tile_expert(shape.max_tiles()), expert_tile(shape.local_experts() + 1),
      expert_rows(shape.local_experts()), slot_rank(shape.choices()), slot_row(shape.choices()),
      counts(kPlanCounts);
  std::vector<const int32_t*> pointers;
  for (int32_t source = 0; source < shape.ranks; ++source) {
    pointers.push_back(routes.data() + source * shape.choices());
  }
  const RankTables output{
      rank,
      {row_source.data(), pull_order.data(), tile_expert.data(), expert_tile.data(),
       expert_rows.data(), slot_rank.data(), slot_row.data(), counts.data()}};
  build_plans(shape, pointers, std::span(&output, 1));
  nb::dict tables;
  tables["row_source"] = array(row_source);
  tables["pull_order"] = array(pull_order);
  tables["tile_expert"] = array(tile_expert);
  tables["expert_tile"] = array(expert_tile);
  tables["expert_rows"] = array(expert_rows);
  tables["slot_rank"] = array(slot_rank);
  tables["slot_row"] = array(slot_row);
  tables["counts"] = array(counts);
  return tables;
}

NB_MODULE(_native, module) {
  module.def("registrations", &registrations);
  module.def("take_faults", &faults);
  module.def("build_plan", &build_plan, nb::arg("routes"), nb::arg("rank"), nb::arg("experts"),
             nb::arg("tile_rows"), nb::arg("chunk_rows"));
  module.def(
      "ring_position",
      [](int64_t row, int64_t ring_rows, int64_t chunk_rows) {
        const Ring ring{ring_rows, chunk_rows};
        return nb::make_tuple(ring.wave(row), ring.slot(row), ring.ring_row(row));
      },
      nb::arg("row"), nb::arg("ring_rows"), nb::arg("chunk_rows"));
  bind_rack(module);
}

}  // namespace
}  // namespace mok
