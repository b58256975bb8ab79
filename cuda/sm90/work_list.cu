#include "link/load_kernels.h"
#include "sm90/work_list.h"

namespace mok::sm90 {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kBlocks = 132;
constexpr unsigned kAllLanes = ~0u;

struct ListCall {
  WorkShape shape;
  int32_t experts;
  int32_t work_tiles_per_tile;
  const int32_t* expert_tile;
  WorkList list;

  __device__ int32_t first_tile(int32_t expert) const {
    return expert_tile[expert] * work_tiles_per_tile;
  }
};

__device__ int32_t scan(int32_t value) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, value, offset);
    value += lane >= offset ? other : 0;
  }
  return value;
}

__device__ int32_t of_last_lane(int32_t value) { return __shfl_sync(kAllLanes, value, kWarp - 1); }

// Units before each expert, and their total behind the last; computed by one warp.
__device__ void units_before_experts(const ListCall& call, Units* before) {
  const int lane = threadIdx.x;
  Units total{};
  for (int32_t begin = 0; begin < call.experts; begin += kWarp) {
    const int32_t expert = begin + lane;
    Units own{};
    if (expert < call.experts) {
      own = units_of(call.shape, call.first_tile(expert + 1) - call.first_tile(expert));
    }
    const Units upto{scan(own.full), scan(own.pair), scan(own.single)};
    if (expert < call.experts) {
      before[expert] = total + upto - own;
    }
    total =
        total + Units{of_last_lane(upto.full), of_last_lane(upto.pair), of_last_lane(upto.single)};
  }
  if (lane == 0) {
    before[call.experts] = total;
  }
}

// The expert to which a unit belongs.
__device__ int32_t expert_of(const Units* before, int32_t experts, int32_t unit) {
  int32_t low = 0;
  int32_t high = experts;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (before[middle].count() <= unit ? low : high) = middle;
  }
  return low;
}

__global__ void __launch_bounds__(kThreads) list_work_kernel(const ListCall call) {
  extern __shared__ Units before_expert[];  // [experts + 1]
  const WorkShape& shape = call.shape;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = thread; i < call.list.counter_count; i += gridDim.x * kThreads) {
    call.list.counters[i] = 0;
  }
  if (threadIdx.x < kWarp) {
    units_before_experts(call, before_expert);
  }
  __syncthreads();

  const Units total = before_expert[call.experts];
  const int32_t units = total.count();
  if (thread == 0) {
    *call.list.item_count = total.items(shape.gate_up_columns, shape.cluster) +
                            total.items(shape.down_columns, shape.cluster);
    *call.list.tile_count = call.first_tile(call.experts);
  }
  const auto before = [&](int32_t unit) {
    if (unit >= units) {
      return total;
    }
    const int32_t expert = expert_of(before_expert, call.experts, unit);
    const Units first = before_expert[expert];
    return first + first_units(before_expert[expert + 1] - first, unit - first.count());
  };

  // A warp takes a unit, its lanes the columns.
  const int lane = threadIdx.x % kWarp;
  for (int32_t unit = static_cast<int32_t>(thread / kWarp); unit < units;
       unit += gridDim.x * (kThreads / kWarp)) {
    const int32_t expert = expert_of(before_expert, call.experts, unit);
    const Units expert_units = before_expert[expert + 1] - before_expert[expert];
    const int32_t index = unit - before_expert[expert].count();
    const UnitKind kind = kind_of(expert_units, index);
    WorkItem item = unit_of(shape, expert, call.first_tile(expert), expert_units, index);

    const int32_t step = unit / shape.step_units();
    const int32_t group_begin = unit / shape.group_units * shape.group_units;
    const int32_t group_end =
        group_begin + shape.group_units < units ? group_begin + shape.group_units : units;
    const Units before_group = before(group_begin);
    const Units group = before(group_end) - before_group;
    const Units before_in_step = before_group - before(step * shape.step_units());
    const int32_t rank = (before(unit) - before_group).of(kind);

    for (const Product product : {Product::kGateUp, Product::kDown}) {
      const int32_t columns = shape.columns(product);
      const int32_t base = items_before(shape, product, step, units, before) +
                           before_in_step.items(columns, shape.cluster);
      const int32_t span = columns_of_item(kind, shape.cluster);
      item.flags |= product == Product::kDown ? WorkItem::kDownFlag : 0;
      for (int32_t column = lane * span; column < columns; column += kWarp * span) {
        item.column_block = column;
        call.list.items[base + item_in_group(group, shape.cluster, kind, rank, column)] = item;
      }
    }
  }
}

}  // namespace

int64_t max_work_tiles(const PlanShape& plan) {
  return plan.max_tiles() * (plan.tile_rows / kTileRows);
}

int64_t max_items(const PlanShape& plan, const WorkShape& shape) {
  // Every expert may end in two units that are not full, each with an item per span of columns.
  const int64_t columns = shape.gate_up_columns + shape.down_columns;
  const int64_t spans =
      ceil_div(shape.gate_up_columns, shape.cluster) + ceil_div(shape.down_columns, shape.cluster);
  return max_work_tiles(plan) / shape.unit_tiles() * columns +
         static_cast<int64_t>(plan.local_experts()) * 2 * spans;
}

cudaError_t list_work(const PlanShape& plan, const WorkShape& shape, const int32_t* expert_tile,
                      const WorkList& list, cudaStream_t stream) {
  const ListCall call{shape, plan.local_experts(), plan.tile_rows / kTileRows, expert_tile, list};
  const size_t bytes = sizeof(Units) * (plan.local_experts() + 1);
  list_work_kernel<<<kBlocks, kThreads, bytes, stream>>>(call);
  return cudaGetLastError();
}

cudaError_t load_work_list() { return load_kernels(list_work_kernel); }

}  // namespace mok::sm90
