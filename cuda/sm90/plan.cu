#include <algorithm>

#include "device/load_kernels.h"
#include "device/warp.cuh"
#include "sm90/plan.h"
#include "sm90/tile.h"

// A stable counting sort of choices by expert. Each block takes a contiguous segment of the
// choices of all ranks, in the order of their global slots:
//   count_choices   counts the experts of its segment;
//   place_choices   sums the earlier segments' counts, lays out the experts' tiles, and gives each
//                   of its choices the next row of its expert.
// Every block of the second kernel repeats the sums: cheaper than a third kernel between the two.
namespace mok::sm90 {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxSegments = 128;
constexpr int kMaxShared = 227 * 1024;

struct Segments {
  int32_t count;
  int64_t choices;  // of each but the last ones
};

Segments segments_of(const PlanShape& shape) {
  const int64_t choices = shape.ranks * shape.choices();
  const int64_t least = std::max<int64_t>((choices + kMaxSegments - 1) / kMaxSegments, 1);
  const int64_t rounded = (least + kThreads - 1) / kThreads * kThreads;
  return {static_cast<int32_t>(std::max<int64_t>((choices + rounded - 1) / rounded, 1)), rounded};
}

// Bins of a segment: experts, then this rank's own choices that have none.
__host__ __device__ int32_t bins_of(const PlanShape& shape) { return shape.experts + 2; }

struct PlanCall {
  PlanShape shape;
  int32_t rank;
  PlanSource source;
  PlanTables tables;
  Segments segments;

  // To be called first in every kernel: one load, so that the loops need no second way to the rank.
  __device__ void find_rank() {
    if (source.rank != nullptr) {
      rank = *source.rank;
    }
  }
  // The expert of a choice, when it is first looked at.
  __device__ int32_t take(int64_t choice) const {
    if (source.copy == nullptr) {
      return source.routes[choice];
    }
    return source.copy[choice] = *source.failed != 0 ? kMaskedChoice : source.routes[choice];
  }
  __device__ int64_t choices() const { return shape.ranks * shape.choices(); }
  __device__ int64_t begin(int64_t segment) const {
    const int64_t first = segment * segments.choices;
    return first < choices() ? first : choices();
  }
  __device__ bool is_own(int64_t choice) const { return choice / shape.choices() == rank; }
};

__global__ void __launch_bounds__(kThreads) count_choices(PlanCall call) {
  extern __shared__ int32_t counts[];
  call.find_rank();
  const int32_t bins = bins_of(call.shape);
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    counts[bin] = 0;
  }
  __syncthreads();
  const int64_t end = call.begin(blockIdx.x + 1);
  for (int64_t choice = call.begin(blockIdx.x) + threadIdx.x; choice < end; choice += kThreads) {
    const int32_t id = call.take(choice);
    if (call.shape.is_expert(id)) {
      atomicAdd(counts + id, 1);
    } else if (call.is_own(choice)) {
      atomicAdd(counts + call.shape.experts + (id == kMaskedChoice ? 0 : 1), 1);
    }
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    call.source.scratch[static_cast<int64_t>(blockIdx.x) * bins + bin] = counts[bin];
  }
}

// Shared memory of place_choices.
struct PlaceShared {
  int32_t* rows;       // [bins] of all segments
  int32_t* next_row;   // [bins] rows of earlier segments, later the next row to give
  int32_t* first_row;  // [experts] on the owner
  int32_t* warp_next;  // [warps, experts]
  __device__ PlaceShared(int32_t* memory, int32_t experts)
      : rows(memory),
        next_row(rows + experts + 2),
        first_row(next_row + experts + 2),
        warp_next(first_row + experts) {}
};

size_t place_shared_bytes(const PlanShape& shape) {
  return sizeof(int32_t) * (2 * bins_of(shape) + shape.experts * (1 + static_cast<size_t>(kWarps)));
}

__device__ void sum_segments(const PlanCall& call, const PlaceShared& shared) {
  const int32_t bins = bins_of(call.shape);
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    shared.rows[bin] = 0;
    shared.next_row[bin] = 0;
  }
  __syncthreads();
  // Threads beyond one a bin take other segments.
  const int stride = (bins + kWarp - 1) / kWarp * kWarp;
  const int teams = kThreads > stride ? kThreads / stride : 1;
  const int team = kThreads > stride ? threadIdx.x / stride : 0;
  const int first_bin = kThreads > stride ? threadIdx.x % stride : threadIdx.x;
  const int bin_step = kThreads > stride ? stride : kThreads;
  const int mine = blockIdx.x;
  for (int bin = first_bin; bin < bins && team < teams; bin += bin_step) {
    int32_t before = 0;
    int32_t all = 0;
#pragma unroll 8
    for (int segment = team; segment < call.segments.count; segment += teams) {
      const int32_t count = call.source.scratch[static_cast<int64_t>(segment) * bins + bin];
      all += count;
      before += segment < mine ? count : 0;
    }
    atomicAdd(shared.rows + bin, all);
    atomicAdd(shared.next_row + bin, before);
  }
  __syncthreads();
}

// One warp: the first row of every expert on its owner; block 0 writes this rank's tables.
__device__ void lay_out_experts(const PlanCall& call, const PlaceShared& shared) {
  const PlanShape& shape = call.shape;
  const PlanTables& tables = call.tables;
  const int lane = threadIdx.x;
  const int32_t local_experts = shape.local_experts();
  const bool writes = blockIdx.x == 0;
  int64_t most_tiles = 0;
  for (int32_t owner = 0; owner < shape.ranks; ++owner) {
    const bool own = writes && owner == call.rank;
    int64_t tiles_before = 0;
    int32_t rows_of_lane = 0;
    for (int32_t begin = 0; begin < local_experts; begin += kWarp) {
      const int32_t local = begin + lane;
      const int32_t expert = owner * local_experts + local;
      const int32_t rows = local < local_experts ? shared.rows[expert] : 0;
      const auto tiles = static_cast<int32_t>(shape.tiles(rows));
      const int32_t scan = inclusive_scan(tiles);
      const auto first_tile = static_cast<int32_t>(tiles_before + scan - tiles);
      if (local < local_experts) {
        shared.first_row[expert] = first_tile * shape.tile_rows;
        if (own) {
          tables.expert_rows[local] = rows;
          tables.expert_tile[local] = first_tile;
          rows_of_lane += rows;
        }
      }
      tiles_before += __shfl_sync(kAllLanes, scan, kWarp - 1);
    }
    most_tiles = most_tiles > tiles_before ? most_tiles : tiles_before;
    if (own) {
      const int32_t rows = __reduce_add_sync(kAllLanes, rows_of_lane);
      if (lane == 0) {
        tables.expert_tile[local_experts] = static_cast<int32_t>(tiles_before);
        tables.counts[kRows] = rows;
        tables.counts[kTiles] = static_cast<int32_t>(tiles_before);
      }
    }
  }
  if (writes && lane == 0) {
    tables.counts[kMostTiles] = static_cast<int32_t>(most_tiles);
    tables.counts[kMasked] = shared.rows[shape.experts];
    tables.counts[kOutOfRange] = shared.rows[shape.experts + 1];
  }
}

// What is no choice's: the experts of tiles, the padding of row_source.
__device__ void fill_tiles(const PlanCall& call, const PlaceShared& shared) {
  const PlanShape& shape = call.shape;
  const int lane = threadIdx.x % kWarp;
  const int warps = gridDim.x * kWarps;
  const int32_t first_expert = call.rank * shape.local_experts();
  for (int32_t local = blockIdx.x * kWarps + threadIdx.x / kWarp; local < shape.local_experts();
       local += warps) {
    const int32_t rows = shared.rows[first_expert + local];
    const int32_t first_row = shared.first_row[first_expert + local];
    const auto tiles = static_cast<int32_t>(shape.tiles(rows));
    for (int32_t tile = lane; tile < tiles; tile += kWarp) {
      call.tables.tile_expert[first_row / shape.tile_rows + tile] = local;
    }
    for (int32_t row = rows + lane; row < tiles * shape.tile_rows; row += kWarp) {
      call.tables.row_source[first_row + row] = kPadding;
    }
  }
  const int32_t last = first_expert + shape.local_experts() - 1;
  const int64_t used_tiles =
      shared.first_row[last] / shape.tile_rows + shape.tiles(shared.rows[last]);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t tile = used_tiles + thread; tile < shape.max_tiles(); tile += threads) {
    call.tables.tile_expert[tile] = kPadding;
  }
  for (int64_t row = used_tiles * shape.tile_rows + thread; row < shape.max_rows();
       row += threads) {
    call.tables.row_source[row] = kPadding;
  }
}

// Counts this warp's share of the segment, [begin, end), by expert.
__device__ void count_of_warp(const PlanCall& call, int32_t* counts, int64_t begin, int64_t end) {
  for (int64_t choice = begin + threadIdx.x % kWarp; choice < end; choice += kWarp) {
    const int32_t id = call.source.routes[choice];
    if (call.shape.is_expert(id)) {
      atomicAdd(counts + id, 1);
    }
  }
}

// Gives the choices of this warp's share their rows, in order.
__device__ void place_of_warp(const PlanCall& call, int32_t* next_row, int64_t begin, int64_t end) {
  const PlanShape& shape = call.shape;
  const int lane = threadIdx.x % kWarp;
  for (int64_t first = begin; first < end; first += kWarp) {
    const int64_t choice = first + lane;
    const bool present = choice < end;
    const int32_t id = present ? call.source.routes[choice] : kMaskedChoice;
    const bool valid = shape.is_expert(id);
    const unsigned same = __match_any_sync(kAllLanes, valid ? id : -1);
    const int earlier = __popc(same & ((1u << lane) - 1));
    int32_t row = kMaskedChoice;
    if (valid) {
      row = next_row[id] + earlier;
    }
    __syncwarp();
    if (valid && earlier == 0) {
      next_row[id] += __popc(same);
    }
    __syncwarp();
    if (!present) {
      continue;
    }
    const int32_t owner = valid ? shape.owner(id) : kMaskedChoice;
    if (valid && owner == call.rank) {
      call.tables.row_source[row] = static_cast<int32_t>(choice);
      if (call.source.to_pull != nullptr && !call.is_own(choice) &&
          needs_first(shape, call.source.routes, choice)) {
        atomicOr(reinterpret_cast<unsigned long long*>(call.source.to_pull) + row / kTileRows,
                 1ull << (row % kTileRows));
      }
    }
    if (call.is_own(choice)) {
      const int64_t own = choice - call.rank * shape.choices();
      call.tables.slot_rank[own] = owner;
      call.tables.slot_row[own] = row;
    }
  }
}

__global__ void __launch_bounds__(kThreads) place_choices(PlanCall call) {
  extern __shared__ int32_t memory[];
  call.find_rank();
  const PlanShape& shape = call.shape;
  const PlaceShared shared(memory, shape.experts);
  const int warp = threadIdx.x / kWarp;

  for (int i = threadIdx.x; i < kWarps * shape.experts; i += kThreads) {
    shared.warp_next[i] = 0;
  }
  sum_segments(call, shared);

  const int64_t share = call.segments.choices / kWarps;
  const int64_t segment_end = call.begin(blockIdx.x + 1);
  const auto share_begin = [&](int64_t index) {
    const int64_t begin = call.begin(blockIdx.x) + index * share;
    return begin < segment_end ? begin : segment_end;
  };
  int32_t* const counts = shared.warp_next + warp * shape.experts;
  count_of_warp(call, counts, share_begin(warp), share_begin(warp + 1));
  if (warp == 0) {
    lay_out_experts(call, shared);
  }
  __syncthreads();

  for (int expert = threadIdx.x; expert < shape.experts; expert += kThreads) {
    int32_t next = shared.first_row[expert] + shared.next_row[expert];
    for (int w = 0; w < kWarps; ++w) {
      int32_t& entry = shared.warp_next[w * shape.experts + expert];
      const int32_t count = entry;
      entry = next;
      next += count;
    }
  }
  __syncthreads();
  place_of_warp(call, counts, share_begin(warp), share_begin(warp + 1));
  fill_tiles(call, shared);
}

// One block per chunk: a round of pulls takes one row from every rank that has any left.
__global__ void __launch_bounds__(kThreads) order_pulls(PlanCall call) {
  extern __shared__ int32_t memory[];
  call.find_rank();
  const PlanShape& shape = call.shape;
  int32_t* const rows_of_visit = memory;              // [ranks]
  int32_t* const next_index = memory + shape.ranks;   // [ranks]
  int32_t* const of_warp = next_index + shape.ranks;  // [warps, ranks]
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;

  const int64_t begin = blockIdx.x * shape.chunk_rows;
  const int64_t limit = begin + shape.chunk_rows;
  const int64_t table_end = limit < shape.max_rows() ? limit : shape.max_rows();
  const int64_t used = static_cast<int64_t>(call.tables.counts[kTiles]) * shape.tile_rows;
  const int64_t end = table_end < used ? table_end : used;
  const auto visit_of = [&](int64_t row) {
    const int32_t source = row < end ? call.tables.row_source[row] : kPadding;
    return source == kPadding ? -1
                              : visit_index(static_cast<int32_t>(source / shape.choices()),
                                            call.rank, shape.ranks);
  };

  for (int i = threadIdx.x; i < 2 * shape.ranks; i += kThreads) {
    memory[i] = 0;
  }
  __syncthreads();
  for (int64_t row = begin + threadIdx.x; row < end; row += kThreads) {
    const int32_t visit = visit_of(row);
    if (visit >= 0) {
      atomicAdd(rows_of_visit + visit, 1);
    }
  }
  __syncthreads();
  int32_t real_rows = 0;
  for (int32_t visit = 0; visit < shape.ranks; ++visit) {
    real_rows += rows_of_visit[visit];
  }

  for (int64_t first = begin; first < end; first += kThreads) {
    for (int i = threadIdx.x; i < kWarps * shape.ranks; i += kThreads) {
      of_warp[i] = 0;
    }
    __syncthreads();
    const int64_t row = first + threadIdx.x;
    const int32_t visit = visit_of(row);
    const unsigned same = __match_any_sync(kAllLanes, visit);
    const int earlier = __popc(same & ((1u << lane) - 1));
    if (visit >= 0 && earlier == 0) {
      of_warp[warp * shape.ranks + visit] = __popc(same);
    }
    __syncthreads();
    if (visit >= 0) {
      int32_t index = next_index[visit] + earlier;
      for (int w = 0; w < warp; ++w) {
        index += of_warp[w * shape.ranks + visit];
      }
      const int64_t position = pull_position(rows_of_visit, shape.ranks, visit, index);
      call.tables.pull_order[begin + position] = static_cast<int32_t>(row);
    }
    __syncthreads();
    for (int v = threadIdx.x; v < shape.ranks; v += kThreads) {
      for (int w = 0; w < kWarps; ++w) {
        next_index[v] += of_warp[w * shape.ranks + v];
      }
    }
    __syncthreads();
  }
  for (int64_t row = begin + real_rows + threadIdx.x; row < table_end; row += kThreads) {
    call.tables.pull_order[row] = kPadding;
  }
}

}  // namespace

int64_t plan_scratch_words(const PlanShape& shape) {
  return static_cast<int64_t>(segments_of(shape).count) * bins_of(shape);
}

bool plan_fits(const PlanShape& shape) { return place_shared_bytes(shape) <= kMaxShared; }

cudaError_t prepare_plan() {
  const cudaError_t error =
      cudaFuncSetAttribute(place_choices, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
  return error != cudaSuccess ? error : load_kernels(count_choices, place_choices, order_pulls);
}

cudaError_t build_plan(const PlanShape& shape, int32_t rank, const PlanSource& source,
                       const PlanTables& tables, cudaStream_t stream) {
  PlanCall call{shape, rank, source, tables, segments_of(shape)};
  count_choices<<<call.segments.count, kThreads, sizeof(int32_t) * bins_of(shape), stream>>>(call);
  if (source.copy != nullptr) {
    call.source.routes = source.copy;
  }
  place_choices<<<call.segments.count, kThreads, place_shared_bytes(shape), stream>>>(call);
  const int64_t chunks = (shape.max_rows() + shape.chunk_rows - 1) / shape.chunk_rows;
  if (tables.pull_order != nullptr && chunks > 0) {
    const size_t bytes = sizeof(int32_t) * shape.ranks * (2 + kWarps);
    order_pulls<<<static_cast<unsigned>(chunks), kThreads, bytes, stream>>>(call);
  }
  return cudaGetLastError();
}

}  // namespace mok::sm90
