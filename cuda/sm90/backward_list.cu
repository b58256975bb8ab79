#include "device/load_kernels.h"
#include "sm90/backward_list.h"
#include "sm90/find_starts.cuh"

namespace mok::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 132;

struct ListCall {
  PlanShape plan;
  BackwardShape shape;
  int32_t rank;
  SavedTiles saved;
  const int32_t* expert_tile;
  const int32_t* row_source;
  BackwardTokens tokens;
  BackwardList list;
  int32_t* failed;

  __device__ bool has_plan() const { return expert_tile[0] != kNoPlan; }
  __device__ BackwardTable table(const Start* starts) const {
    return {shape, {shape.work, starts, plan.local_experts()}};
  }
  // Of a row whose token a peer has; -1 otherwise.
  __device__ int32_t remote_token(int64_t row) const {
    const int32_t slot = row_source[row];
    return slot < 0 || slot / plan.choices() == rank ? -1 : slot / plan.top_k;
  }
  __device__ void keep_places(int64_t row) const {
    const int32_t slot = row_source[row], remote = remote_token(row);
    const auto place_in = [&](const TokenPlaces& in) {
      if (slot < 0) {
        return tokens.zeros;
      }
      if (in.ring != nullptr) {
        return in.ring + row % (shape.work.ring_tiles * kTileRows) * tokens.width;
      }
      return remote >= 0 ? in.received + remote * tokens.width
                         : in.own + (slot / plan.top_k - rank * plan.tokens) * tokens.width;
    };
    list.x_rows[row] = place_in(tokens.x);
    list.dy_rows[row] = place_in(tokens.dy);
  }
};

__device__ void find_waves(const ListCall& call, const BackwardTable& table) {
  const Start end = table.units.starts[table.units.experts];
  const bool parts_matter = call.saved.beside_parts < call.saved.tiles;
  const int32_t saved =
      parts_matter && table.splits_experts() ? call.saved.beside_parts : call.saved.tiles;
  int32_t first_item = 0, count = 0;
  Units before{};
  do {
    const Units after = table.end_of_wave(before);
    const BackwardWave wave = table.wave(before, after, saved, first_item);
    const BackwardRanges ranges = table.ranges_of(wave, after);
    call.list.waves[count] = wave;
    call.list.ranges[count] = ranges;
    first_item = ranges.weights.end;
    before = after;
    ++count;
  } while (!table.is_end(before));
  call.list.waves[count] = {end.units, end.tile, first_item, 0, table.units.experts, 0};
  *call.list.all_items = {0, first_item};
  *call.list.wave_count = count;
  *call.list.tile_count = end.tile;
}

// One thread follows the waves; the other blocks find where the token of every row lies, and the
// first row of every token that a peer has.
__global__ void __launch_bounds__(kThreads) find_waves_kernel(const ListCall call) {
  extern __shared__ Start starts[];  // [experts + 1]
  if (!call.has_plan()) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      *call.failed = 1;
    }
    return;
  }
  if (threadIdx.x < kWarp) {
    find_starts(call.shape.work, call.plan.local_experts(), call.expert_tile, starts);
  }
  __syncthreads();
  const BackwardTable table = call.table(starts);
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) {
      find_waves(call, table);
    }
    return;
  }
  const int64_t rows = int64_t{starts[call.plan.local_experts()].tile} * kTileRows;
  for (int64_t row = (blockIdx.x - 1) * kThreads + threadIdx.x; row < rows;
       row += (gridDim.x - 1) * kThreads) {
    call.keep_places(row);
    const int32_t remote = call.remote_token(row);
    if (remote >= 0 && call.list.first_row != nullptr) {
      atomicMin(call.list.first_row + remote, static_cast<int32_t>(row));
    }
  }
}

__global__ void __launch_bounds__(kThreads) place_items_kernel(const ListCall call) {
  extern __shared__ Start starts[];  // [experts + 1]
  if (!call.has_plan()) {
    return;
  }
  if (threadIdx.x < kWarp) {
    find_starts(call.shape.work, call.plan.local_experts(), call.expert_tile, starts);
  }
  __syncthreads();
  const BackwardTable table = call.table(starts);
  const BackwardList& list = call.list;
  const int32_t waves = *list.wave_count;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int32_t warp = static_cast<int32_t>(thread / kWarp);
  const int32_t warps = gridDim.x * (kThreads / kWarp);
  const int lane = threadIdx.x % kWarp;

  const int32_t units = starts[call.plan.local_experts()].units.count();
  for (int32_t unit = warp; unit < units; unit += warps) {
    table.place_unit(unit, list.waves, waves, lane, kWarp,
                     [&](int32_t position, const WorkItem& item) { list.items[position] = item; });
  }
  const int32_t per_expert = call.shape.items_of_expert();
  for (int32_t w = 0; w < waves; ++w) {
    const BackwardWave& wave = list.waves[w];
    const int32_t end = list.waves[w + 1].first_item;
    const int32_t count = wave.experts * per_expert;
    for (int32_t i = static_cast<int32_t>(thread); i < count; i += gridDim.x * kThreads) {
      list.items[end - count + i] =
          table.weight_item(wave.first_expert + i / per_expert, w, i % per_expert);
    }
  }
  if (list.to_pull == nullptr) {
    return;
  }
  const int64_t rows = int64_t{starts[call.plan.local_experts()].tile} * kTileRows;
  for (int64_t row = thread; row < rows; row += gridDim.x * kThreads) {
    const int32_t token = call.remote_token(row);
    if (token >= 0 && list.first_row[token] == row) {
      atomicOr(reinterpret_cast<unsigned long long*>(list.to_pull) + row / kTileRows,
               1ull << (row % kTileRows));
    }
  }
}

}  // namespace

int64_t max_backward_items(const PlanShape& plan, const BackwardShape& shape) {
  // Every expert may end in two units that are not full, each with an item per span of columns.
  const int64_t columns =
      int64_t{shape.replay_columns} + shape.hidden_columns + shape.input_columns;
  const int64_t units = plan.max_tiles() / shape.work.unit_tiles() + 2 * plan.local_experts();
  // An expert's gradients are items of one wave, and of one more each time that it is split.
  const int64_t expert_waves = plan.local_experts() + max_splits(plan.max_tiles(), shape);
  return units * columns + expert_waves * shape.items_of_expert();
}

cudaError_t list_backward(const PlanShape& plan, const BackwardShape& shape, int32_t rank,
                          const SavedTiles& saved, const int32_t* expert_tile,
                          const int32_t* row_source, const BackwardTokens& tokens,
                          const BackwardList& list, int32_t* failed, cudaStream_t stream) {
  const ListCall call{plan, shape, rank, saved, expert_tile, row_source, tokens, list, failed};
  const size_t bytes = sizeof(Start) * (plan.local_experts() + 1);
  find_waves_kernel<<<kBlocks, kThreads, bytes, stream>>>(call);
  place_items_kernel<<<kBlocks, kThreads, bytes, stream>>>(call);
  return cudaGetLastError();
}

cudaError_t load_backward_list() { return load_kernels(find_waves_kernel, place_items_kernel); }

}  // namespace mok::sm90
