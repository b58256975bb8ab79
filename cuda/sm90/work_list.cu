#include "device/load_kernels.h"
#include "device/warp.cuh"
#include "sm90/find_starts.cuh"
#include "sm90/unit_table.h"
#include "sm90/work_list.h"

namespace mok::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 132;

struct ListCall {
  WorkShape shape;
  int32_t experts;
  const int32_t* expert_tile;
  WorkList list;
};

__global__ void __launch_bounds__(kThreads) list_work_kernel(const ListCall call) {
  extern __shared__ Start starts[];  // [experts + 1]
  const WorkShape& shape = call.shape;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (threadIdx.x < kWarp) {
    find_starts(shape, call.experts, call.expert_tile, starts);
  }
  __syncthreads();

  const Start total = starts[call.experts];
  if (thread == 0) {
    *call.list.all_items = {0, total.units.items(shape.gate_up_columns, shape.cluster) +
                                   total.units.items(shape.down_columns, shape.cluster)};
    *call.list.tile_count = total.tile;
  }

  // A warp takes a unit, its lanes the columns.
  const UnitTable table{shape, starts, call.experts};
  for (int64_t wave = thread; wave < call.list.wave_count; wave += int64_t{gridDim.x} * kThreads) {
    call.list.waves[wave] = table.wave(static_cast<int32_t>(wave));
  }
  const int lane = threadIdx.x % kWarp;
  for (int32_t unit = static_cast<int32_t>(thread / kWarp); unit < total.units.count();
       unit += gridDim.x * (kThreads / kWarp)) {
    table.place_items(unit, lane, kWarp, [&](int32_t position, const WorkItem& item) {
      call.list.items[position] = item;
    });
  }
}

}  // namespace

int64_t max_items(const PlanShape& plan, const WorkShape& shape) {
  // Every expert may end in two units that are not full, each with an item per span of columns.
  const int64_t columns = shape.gate_up_columns + shape.down_columns;
  const int64_t spans =
      ceil_div(shape.gate_up_columns, shape.cluster) + ceil_div(shape.down_columns, shape.cluster);
  return plan.max_tiles() / shape.unit_tiles() * columns +
         static_cast<int64_t>(plan.local_experts()) * 2 * spans;
}

cudaError_t list_work(const PlanShape& plan, const WorkShape& shape, const int32_t* expert_tile,
                      const WorkList& list, cudaStream_t stream) {
  const ListCall call{shape, plan.local_experts(), expert_tile, list};
  const size_t bytes = sizeof(Start) * (plan.local_experts() + 1);
  list_work_kernel<<<kBlocks, kThreads, bytes, stream>>>(call);
  return cudaGetLastError();
}

cudaError_t load_work_list() { return load_kernels(list_work_kernel); }

}  // namespace mok::sm90
