#include "call/backward.h"

#include "call/clamp.h"
#include "call/device.h"
#include "call/launches.h"
#include "call/parts.h"
#include "call/peers.h"
#include "link/exchange.h"
#include "sm90/backward.h"
#include "sm90/backward_list.h"
#include "sm90/backward_moves.h"
#include "sm90/choices.h"
#include "sm90/finish.h"
#include "sm90/tensor_map.h"
#include "sm90/weighted_sum.h"

namespace mok {
namespace {

using namespace mok::sm90;

BackwardShape shape_of(const BackwardSizes& sizes) {
  constexpr int kGroupUnits = 8;
  return backward_shape(kCluster, static_cast<int32_t>(sizes.ring_rows / kTileRows),
                        static_cast<int32_t>(sizes.plan.max_tiles()),
                        static_cast<int32_t>(sizes.hidden), static_cast<int32_t>(sizes.inner),
                        kGroupUnits);
}

constexpr int kWaveLaunches = 4;  // of a wave of the composed pass, with items

struct Workspace {
  BackwardList list;
  uint16_t* gradient_ring;  // [ring_rows, 2, inner]; only if it does not replace what is saved
  uint16_t* hidden_ring;    // [ring_rows, inner]
  float* dot_parts;         // [ring_rows, blocks of 128 of inner]
  uint4* lower_halves;      // of partial sums; only if there may be any, and not in what is saved
  uint16_t* received_x;     // [ranks, tokens, hidden]; only if the kernel pulls them
  uint16_t* received_dy;    // likewise
  float* weights;           // [ranks, tokens, top_k]; only with peers
  uint16_t* dx_rows;        // home slots or rows of dx, [rows, hidden]; only without peers
  float* d_weights;         // likewise of the router weights' gradients, [rows]

  // Only for the composed pass, [ring_rows, hidden]: a wave's rows.
  uint16_t* x_ring;
  uint16_t* dy_ring;
  uint16_t* dx_ring;  // only if they are pushed

  // Set to zero before a call: zero_bytes from `zero` on.
  char* zero;
  int64_t zero_bytes;
  int32_t* link_failed;
  int32_t* kernel_failed;
  int32_t* counts;         // of no plan: the forward call has reported its counts
  uint16_t* zeros;         // [hidden]
  uint32_t* next_items;    // one; or one a launch
  uint32_t* replayed;      // [tiles]
  uint32_t* hidden_ready;  // [tiles]
  uint32_t* wave_done;     // [waves]
  uint32_t* pulled;        // [tiles]; only if the kernel pulls

  int64_t bytes;
};

// The lower halves of the partial sums of one expert's gradients.
int64_t halves_bytes(const BackwardShape& shape) {
  return int64_t{shape.items_of_expert()} * kCluster * kBlockRows * kBlockColumns * 2;
}

// Tiles of pre-activations that take as many bytes.
int64_t halves_tiles(const BackwardSizes& sizes, const BackwardShape& shape) {
  const int64_t tile_bytes = 2 * kTileRows * sizes.inner * kBytesPerElement;
  return (halves_bytes(shape) + tile_bytes - 1) / tile_bytes;
}

// Whether they replace, if an expert is split, the last pre-activations that are saved: beyond the
// ring, where gradients replace those saved.
bool halves_replace_saved(const BackwardSizes& sizes, const BackwardShape& shape) {
  return sizes.replaces_saved() &&
         (sizes.saved_rows - sizes.ring_rows) / kTileRows >= halves_tiles(sizes, shape);
}

SavedTiles saved_tiles(const BackwardSizes& sizes, const BackwardShape& shape) {
  const auto tiles = static_cast<int32_t>(sizes.saved_rows / kTileRows);
  const int64_t halves =
      halves_replace_saved(sizes, shape) ? halves_tiles(sizes, shape) : int64_t{0};
  return {tiles, static_cast<int32_t>(tiles - halves)};
}

// Where they lie.
uint4* lower_halves(const BackwardCall& call, const Workspace& space, const BackwardShape& shape) {
  if (!halves_replace_saved(call.sizes, shape)) {
    return space.lower_halves;
  }
  const int64_t before = saved_tiles(call.sizes, shape).beside_parts;
  return reinterpret_cast<uint4*>(call.saved + before * 2 * kTileRows * call.sizes.inner);
}

Workspace lay_out(const BackwardSizes& sizes, char* base) {
  const PlanShape& plan = sizes.plan;
  const BackwardShape shape = shape_of(sizes);
  const bool has_peers = sizes.has_peers();
  const int64_t tiles = plan.max_tiles();
  const int64_t waves = max_backward_waves(plan, shape);
  Parts parts(base);
  Workspace space{};
  space.list.items = parts.take<WorkItem>(max_backward_items(plan, shape));
  space.list.waves = parts.take<BackwardWave>(waves + 1);
  space.list.all_items = parts.take<ItemRange>(1);
  space.list.wave_count = parts.take<int32_t>(1);
  space.list.tile_count = parts.take<int32_t>(1);
  space.list.x_rows = parts.take<const uint16_t*>(tiles * kTileRows);
  space.list.dy_rows = parts.take<const uint16_t*>(tiles * kTileRows);
  space.list.first_row = sizes.pulls() ? parts.take<int32_t>(plan.ranks * plan.tokens) : nullptr;
  space.gradient_ring =
      sizes.replaces_saved() ? nullptr : parts.take<uint16_t>(2 * sizes.ring_rows * sizes.inner);
  space.hidden_ring = parts.take<uint16_t>(sizes.ring_rows * sizes.inner);
  space.dot_parts = parts.take<float>(sizes.ring_rows * shape.replay_columns);
  space.lower_halves = waves > 1 && !halves_replace_saved(sizes, shape)
                           ? reinterpret_cast<uint4*>(parts.take<char>(halves_bytes(shape)))
                           : nullptr;
  const auto rows_if = [&](bool needed, int64_t rows) {
    return needed ? parts.take<uint16_t>(rows * sizes.hidden) : nullptr;
  };
  space.received_x = rows_if(sizes.pulls_x(), plan.ranks * plan.tokens);
  space.received_dy = rows_if(sizes.pulls_dy(), plan.ranks * plan.tokens);
  space.weights = has_peers ? parts.take<float>(plan.ranks * plan.choices()) : nullptr;
  space.dx_rows = rows_if(!has_peers, sizes.dx_rows());
  space.d_weights = has_peers ? nullptr : parts.take<float>(sizes.dx_rows());
  space.x_ring = rows_if(sizes.composed, sizes.ring_rows);
  space.dy_ring = rows_if(sizes.composed, sizes.ring_rows);
  space.dx_ring =
      rows_if(sizes.composed && sizes.directions.reverse_dispatch_push, sizes.ring_rows);

  const int64_t zero_begin = parts.used();
  space.zero = parts.take<char>(0);
  space.link_failed = parts.take<int32_t>(1);
  space.kernel_failed = parts.take<int32_t>(1);
  space.counts = parts.take<int32_t>(kPlanCounts);
  space.list.ranges = parts.take<BackwardRanges>(waves);
  space.zeros = parts.take<uint16_t>(sizes.hidden);
  space.next_items = parts.take<uint32_t>(sizes.composed ? waves * kWaveLaunches : 1);
  space.replayed = parts.take<uint32_t>(tiles);
  space.hidden_ready = parts.take<uint32_t>(tiles);
  space.wave_done = parts.take<uint32_t>(waves);
  space.pulled = sizes.pulls() ? parts.take<uint32_t>(tiles) : nullptr;
  space.list.to_pull = sizes.pulls() ? parts.take<uint64_t>(tiles) : nullptr;
  space.zero_bytes = parts.used() - zero_begin;

  space.bytes = parts.used();
  return space;
}

template <typename Gradient>
bool encode_gradients(const BackwardCall& call, BackwardParams* params) {
  const int64_t experts = call.sizes.plan.local_experts();
  const int64_t hidden = call.sizes.hidden, inner = call.sizes.inner;
  const auto encode = [](CUtensorMap* map, const void* data, int64_t rows, int64_t columns,
                         int box_rows) {
    return encode_matrix(map, static_cast<const Gradient*>(data), rows, columns, box_rows);
  };
  return encode(&params->d_gate, call.d_gate, experts * hidden, inner, kTileRows) &&
         encode(&params->d_up, call.d_up, experts * hidden, inner, kTileRows) &&
         encode(&params->d_down, call.d_down, experts * inner, hidden,
                kSwizzleBytes / sizeof(Gradient));
}

uint16_t* gradient_ring(const BackwardCall& call, const Workspace& space) {
  return call.sizes.replaces_saved() ? call.saved : space.gradient_ring;
}

bool encode_maps(const BackwardCall& call, const Workspace& space, BackwardParams* params) {
  const int64_t experts = call.sizes.plan.local_experts();
  const int64_t hidden = call.sizes.hidden, inner = call.sizes.inner;
  // A ring of blocks of 64 x 64 is a matrix of 64 columns.
  const int64_t rows = call.sizes.ring_rows * (inner / kPanelColumns);
  const uint16_t* const gradients = gradient_ring(call, space);
  const uint16_t* const weighted = space.hidden_ring;
  return encode_matrix(&params->gate, call.gate, experts * hidden, inner, kBlockDepth) &&
         encode_matrix(&params->up, call.up, experts * hidden, inner, kBlockDepth) &&
         encode_matrix(&params->down, call.down, experts * inner, hidden, kBlockDepth) &&
         encode_matrix(&params->gradient_blocks, gradients, 2 * rows, kPanelColumns, kTileRows) &&
         encode_matrix(&params->gradient_warps, gradients, 2 * rows, kPanelColumns, kWarpRows) &&
         encode_matrix(&params->hidden_blocks, weighted, rows, kPanelColumns, kTileRows) &&
         encode_matrix(&params->hidden_warps, weighted, rows, kPanelColumns, kWarpRows) &&
         (call.dw_is_f32 ? encode_gradients<float>(call, params)
                         : encode_gradients<uint16_t>(call, params));
}

// What the pushing peers have filled, or null.
struct Received {
  const uint16_t* x;
  const uint16_t* dy;
};

// The backward pass wave by wave instead of in one launch. As many waves as the worst load takes;
// those without rows end at once.
void launch_waves(const BackwardCall& call, const Workspace& space, const BackwardParams& all,
                  const Received& received, int clusters, cudaStream_t stream, Launches& launch) {
  BackwardParams params = all;
  const int64_t waves = max_backward_waves(call.sizes.plan, params.shape);
  for (int32_t wave = 0; wave < waves; ++wave) {
    const WaveMoves moves{params, space.list.wave_count, wave};
    launch("dispatch",
           dispatch_tokens(moves, {call.x, received.x, params.x_offset, space.x_ring},
                           {call.dy, received.dy, params.dy_offset, space.dy_ring}, stream));
    const auto multiply = [&](const char* what, const ItemRange* range, int index) {
      params.range = range;
      params.next_item = space.next_items + wave * kWaveLaunches + index;
      launch(what, launch_backward(params, clusters, stream));
    };
    const BackwardRanges* const ranges = space.list.ranges + wave;
    multiply("replay", &ranges->replay, 0);
    multiply("hidden", &ranges->hidden, 1);
    multiply("input", &ranges->input, 2);
    if (call.sizes.directions.reverse_dispatch_push) {
      launch("combine", combine_gradients(moves, stream));
    }
    multiply("weights", &ranges->weights, 3);
  }
}

}  // namespace

int64_t backward_workspace_bytes(const BackwardSizes& sizes) {
  return lay_out(sizes, nullptr).bytes;
}

std::string launch_backward_call(const BackwardCall& call, int32_t ordinal, cudaStream_t stream) {
  const BackwardSizes& sizes = call.sizes;
  const PlanShape& plan = sizes.plan;
  const BackwardShape shape = shape_of(sizes);
  const ArenaLayout layout = sizes.arena_layout();
  const Arena* arena = nullptr;
  if (std::string problem = find_peers(call.communicator, layout, &arena); !problem.empty()) {
    return problem;
  }
  const Workspace space = lay_out(sizes, call.workspace.data);
  if (call.workspace.bytes < space.bytes) {
    return "the workspace is too small";
  }
  const Device device = device_of(ordinal);
  const int32_t rank = arena == nullptr ? 0 : arena->rank;
  const int64_t choices = plan.choices();
  const bool is_pushed = sizes.directions.reverse_dispatch_push;
  // Where this rank finds its tokens' gradients, or leaves those of its experts to be found.
  uint16_t* dx_rows = space.dx_rows;
  float* d_weights = space.d_weights;
  uint16_t* received_x = space.received_x;
  uint16_t* received_dy = space.received_dy;
  if (arena != nullptr) {
    const auto part_of_arena = [&](int64_t offset) {
      return reinterpret_cast<uint16_t*>(arena->own + offset);
    };
    dx_rows = part_of_arena(layout.rows_offset());
    d_weights = reinterpret_cast<float*>(arena->own + layout.numbers_offset());
    if (layout.x_is_pushed) {
      received_x = part_of_arena(layout.x_offset());
    }
    if (layout.dy_is_pushed) {
      received_dy = part_of_arena(layout.dy_offset());
    }
  }

  BackwardParams params{};
  if (!encode_maps(call, space, &params)) {
    return "the driver refuses the tensor maps of these shapes";
  }
  params.received_x = received_x;
  params.received_dy = received_dy;
  params.pulls_x = sizes.pulls_x();
  params.pulls_dy = sizes.pulls_dy();
  params.weights = arena == nullptr ? call.weights : space.weights;
  params.saved = call.saved;
  params.gradient_ring = gradient_ring(call, space);
  if (space.dx_ring != nullptr) {
    params.outputs = {space.dx_ring, static_cast<int32_t>(sizes.ring_rows)};
  } else if (!is_pushed) {
    params.outputs = {dx_rows, static_cast<int32_t>(plan.max_rows())};
  }
  params.d_weight_rows = is_pushed ? nullptr : d_weights;
  params.own_slots = space.dx_rows;
  params.own_d_weight = space.d_weights;
  params.bases = arena == nullptr ? nullptr : arena->bases;
  params.x_offset = layout.x_offset();
  params.dy_offset = layout.dy_offset();
  params.slots_offset = layout.rows_offset();
  params.d_weight_offset = layout.numbers_offset();
  params.row_source = call.row_source;
  params.zeros = space.zeros;
  params.x_rows = space.list.x_rows;
  params.dy_rows = space.list.dy_rows;
  params.expert_tile = call.expert_tile;
  params.items = space.list.items;
  params.range = space.list.all_items;
  params.tile_count = space.list.tile_count;
  params.waves = space.list.waves;
  params.to_pull = space.list.to_pull;
  params.pulled = space.pulled;
  params.next_item = space.next_items;
  params.replayed = space.replayed;
  params.hidden_ready = space.hidden_ready;
  params.wave_done = space.wave_done;
  params.fault = space.kernel_failed;
  params.skip = space.link_failed;
  params.dot_parts = space.dot_parts;
  params.d_gate_data = call.d_gate;
  params.d_up_data = call.d_up;
  params.d_down_data = call.d_down;
  params.lower_halves = lower_halves(call, space, shape);
  params.dw_is_f32 = call.dw_is_f32 ? 1 : 0;
  params.hidden = static_cast<int32_t>(sizes.hidden);
  params.inner = static_cast<int32_t>(sizes.inner);
  params.ranks = plan.ranks;
  params.rank = rank;
  params.tokens = static_cast<int32_t>(plan.tokens);
  params.top_k = plan.top_k;
  params.choices = static_cast<int32_t>(choices);
  params.shape = shape;
  params.clamp = clamp_at(call.clamp);
  params.timeout_ns = call.timeout_ns;

  count_launched_call();
  Launches launch;
  const auto meet = [&](const char* what, Meeting meeting) {
    launch(what, barrier(*arena, layout, meeting, call.timeout_ns, space.kernel_failed,
                         space.link_failed, device.record, stream));
  };
  launch("zero", cudaMemsetAsync(space.zero, 0, space.zero_bytes, stream));
  if (sizes.pulls()) {
    constexpr int kLarge = 0x7f;  // in every byte
    launch("first rows", cudaMemsetAsync(space.list.first_row, kLarge,
                                         sizeof(int32_t) * plan.ranks * plan.tokens, stream));
  }
  if (arena != nullptr) {
    launch("publish", publish_gradients(*arena, layout, plan, call.weights, call.slot_rank, call.x,
                                        call.dy, stream));
    meet("entry barrier", Meeting::kEntry);
    launch("weights",
           cudaMemcpyAsync(space.weights, arena->own + layout.choices_offset(),
                           sizeof(float) * plan.ranks * choices, cudaMemcpyDeviceToDevice, stream));
  }
  launch("work list", list_backward(plan, shape, rank, saved_tiles(sizes, shape), call.expert_tile,
                                    call.row_source,
                                    {.x = {call.x, received_x, space.x_ring},
                                     .dy = {call.dy, received_dy, space.dy_ring},
                                     .zeros = space.zeros,
                                     .width = sizes.hidden},
                                    space.list, space.link_failed, stream));
  if (sizes.composed) {
    launch_waves(call, space, params, {received_x, received_dy}, device.backward_clusters, stream,
                 launch);
  } else {
    launch("backward", launch_backward(params, device.backward_clusters, stream));
  }
  if (arena != nullptr) {
    if (launch.failed()) {  // the peers' slots are not filled
      cudaMemsetAsync(space.kernel_failed, 1, sizeof(int32_t), stream);
    }
    meet("exit barrier", Meeting::kExit);
  }
  launch("sum", weighted_sum({.slots = is_pushed ? dx_rows : nullptr,
                              .outputs = dx_rows,
                              .bases = params.bases,
                              .outputs_offset = layout.rows_offset(),
                              .slot_row = call.slot_row,
                              .slot_rank = call.slot_rank,
                              .weights = nullptr,
                              .out = call.dx,
                              .tokens = plan.tokens,
                              .top_k = plan.top_k,
                              .width = params.hidden},
                             stream));
  launch("router weights", collect_choices({.slots = is_pushed ? d_weights : nullptr,
                                            .rows = d_weights,
                                            .bases = params.bases,
                                            .rows_offset = layout.numbers_offset(),
                                            .slot_row = call.slot_row,
                                            .slot_rank = call.slot_rank,
                                            .count = choices,
                                            .out = call.d_weights},
                                           stream));
  const int64_t dw_elements =
      plan.local_experts() * sizes.hidden * sizes.inner * (call.dw_is_f32 ? 2 : 1);
  launch("finish", finish({.link_failed = space.link_failed,
                           .kernel_failed = space.kernel_failed,
                           .counts = space.counts,
                           .experts = plan.experts,
                           .results = {{call.dx, plan.tokens * sizes.hidden},
                                       {reinterpret_cast<uint16_t*>(call.d_weights), 2 * choices},
                                       {static_cast<uint16_t*>(call.d_gate), dw_elements},
                                       {static_cast<uint16_t*>(call.d_up), dw_elements},
                                       {static_cast<uint16_t*>(call.d_down), dw_elements}},
                           .kept_plan = nullptr,
                           .record = device.record},
                          stream));
  return launch.result();
}

}  // namespace mok
