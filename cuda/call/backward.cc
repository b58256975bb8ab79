#include "call/backward.h"

#include <algorithm>

#include "call/clamp.h"
#include "call/device.h"
#include "call/launches.h"
#include "call/peers.h"
#include "call/timeline.h"
#include "link/exchange.h"
#include "sm90/backward.h"
#include "sm90/backward_list.h"
#include "sm90/backward_moves.h"
#include "sm90/choices.h"
#include "sm90/finish.h"
#include "sm90/pull_share.h"
#include "sm90/round_rows.h"
#include "sm90/tensor_map.h"
#include "sm90/weighted_sum.h"

namespace mok {
namespace {

using namespace mok::sm90;

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

uint16_t* gradient_ring(const BackwardCall& call, const BackwardWorkspace& space) {
  return call.sizes.replaces_saved() ? call.saved : space.gradient_ring;
}

bool encode_maps(const BackwardCall& call, const BackwardWorkspace& space, BackwardParams* params) {
  const int64_t experts = call.sizes.plan.local_experts();
  const int64_t hidden = call.sizes.hidden, inner = call.sizes.inner;
  // A ring of blocks of 64 x 64 is a matrix of 64 columns.
  const int64_t rows =
      std::min(call.sizes.ring_rows, call.sizes.plan.max_rows()) * (inner / kPanelColumns);
  const uint16_t* const gradients = gradient_ring(call, space);
  const uint16_t* const weighted = space.hidden_ring;
  const uint16_t* const replay_gate = call.replay_gate == nullptr ? call.gate : call.replay_gate;
  const uint16_t* const replay_up = call.replay_up == nullptr ? call.up : call.replay_up;
  return encode_matrix(&params->gate, replay_gate, experts * hidden, inner, kBlockDepth) &&
         encode_matrix(&params->up, replay_up, experts * hidden, inner, kBlockDepth) &&
         encode_matrix(&params->input_gate, call.gate, experts * hidden, inner, kBlockDepth) &&
         encode_matrix(&params->input_up, call.up, experts * hidden, inner, kBlockDepth) &&
         encode_matrix(&params->down, call.down, experts * inner, hidden, kBlockDepth) &&
         encode_matrix(&params->gradient_blocks, gradients, 2 * rows, kPanelColumns, kTileRows) &&
         encode_matrix(&params->gradient_warps, gradients, 2 * rows, kPanelColumns, kWarpRows) &&
         encode_matrix(&params->hidden_blocks, weighted, rows, kPanelColumns, kTileRows) &&
         encode_matrix(&params->hidden_warps, weighted, rows, kPanelColumns, kWarpRows) &&
         (call.dw_is_f32 ? encode_gradients<float>(call, params)
                         : encode_gradients<uint16_t>(call, params));
}

// Where the lower halves of partial sums lie.
uint4* lower_halves(const BackwardCall& call, const BackwardWorkspace& space) {
  const BackwardSizes& sizes = call.sizes;
  if (!sizes.halves_replace_saved()) {
    return space.lower_halves;
  }
  const int64_t before = sizes.saved_tiles().beside_parts;
  return reinterpret_cast<uint4*>(call.saved + before * 2 * kTileRows * sizes.inner);
}

// Where this rank finds its tokens' gradients, or leaves those of its experts to be found, and
// where it receives what peers have.
struct Places {
  uint16_t* dx_rows;
  float* d_weights;
  uint16_t* received_x;
  uint16_t* received_dy;
  // Its own in MXFP8, beside those received; null if all are expanded wave by wave.
  uint16_t* rounded_x;
  uint16_t* rounded_dy;
};

Places find_places(const BackwardSizes& sizes, const BackwardWorkspace& space,
                   const ArenaLayout& layout, const Arena* arena) {
  Places places{space.dx_rows,     space.d_weights, space.received_x,
                space.received_dy, space.rounded_x, space.rounded_dy};
  if (arena == nullptr) {
    return places;
  }
  const auto part_of_arena = [&](int64_t offset) {
    return reinterpret_cast<uint16_t*>(arena->own + offset);
  };
  places.dx_rows = part_of_arena(layout.rows_offset());
  places.d_weights = reinterpret_cast<float*>(arena->own + layout.numbers_offset());
  if (sizes.is_mx) {
    if (sizes.pulls()) {
      const int64_t own = arena->rank * sizes.plan.tokens * sizes.hidden;
      places.rounded_x = space.received_x + own;
      places.rounded_dy = space.received_dy + own;
    }
    return places;
  }
  if (layout.x_is_pushed) {
    places.received_x = part_of_arena(layout.x_offset());
  }
  if (layout.dy_is_pushed) {
    places.received_dy = part_of_arena(layout.dy_offset());
  }
  return places;
}

// This rank's, as products take them.
struct OwnTokens {
  const uint16_t* x;
  const uint16_t* dy;
};

OwnTokens own_tokens(const BackwardCall& call, const Places& places) {
  return call.sizes.is_mx ? OwnTokens{places.rounded_x, places.rounded_dy}
                          : OwnTokens{call.x, call.dy};
}

// All but the tensor maps.
void fill_params(const BackwardCall& call, const BackwardWorkspace& space, const Places& places,
                 const ArenaLayout& layout, const Arena* arena, BackwardParams* filled) {
  const BackwardSizes& sizes = call.sizes;
  const PlanShape& plan = sizes.plan;
  const bool is_pushed = sizes.directions.reverse_dispatch_push;
  BackwardParams& params = *filled;
  params.shape = sizes.shape();
  params.received_x = places.received_x;
  params.received_dy = places.received_dy;
  params.weights = arena == nullptr ? call.weights : space.weights;
  params.saved = call.saved;
  params.gradient_ring = gradient_ring(call, space);
  if (space.dx_ring != nullptr) {
    params.outputs = {space.dx_ring, static_cast<int32_t>(sizes.ring_rows)};
  } else if (!is_pushed) {
    params.outputs = {places.dx_rows, static_cast<int32_t>(plan.max_rows())};
  }
  params.d_weight_rows = is_pushed ? nullptr : places.d_weights;
  params.own_slots = space.dx_rows;
  params.own_d_weight = space.d_weights;
  params.bases = arena == nullptr ? nullptr : arena->bases;
  params.x_offset = layout.x_offset();
  params.dy_offset = layout.dy_offset();
  params.slots_offset = layout.rows_offset();
  params.d_weight_offset = layout.numbers_offset();
  params.x_is_pushed = layout.x_is_pushed;
  params.dy_is_pushed = layout.dy_is_pushed;
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
  params.x_pulled = space.x_pulled;
  params.dy_pulled = space.dy_pulled;
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
  params.lower_halves = lower_halves(call, space);
  params.dw_is_f32 = call.dw_is_f32 ? 1 : 0;
  params.hidden = static_cast<int32_t>(sizes.hidden);
  params.inner = static_cast<int32_t>(sizes.inner);
  params.ranks = plan.ranks;
  params.rank = arena == nullptr ? 0 : arena->rank;
  params.tokens = static_cast<int32_t>(plan.tokens);
  params.top_k = plan.top_k;
  params.choices = static_cast<int32_t>(plan.choices());
  params.clamp = clamp_at(call.clamp);
  params.timeout_ns = call.timeout_ns;
}

// The backward pass wave by wave instead of in one launch. As many waves as the worst load takes;
// those without rows end at once.
void launch_waves(const BackwardCall& call, const BackwardWorkspace& space,
                  const BackwardParams& all, const Places& places, int clusters,
                  cudaStream_t stream, Launches& launch) {
  BackwardParams params = all;
  const BackwardSizes& sizes = call.sizes;
  const OwnTokens own = own_tokens(call, places);
  const int64_t waves = max_backward_waves(call.sizes.plan.max_tiles(),
                                           call.sizes.plan.local_experts(), params.shape);
  for (int32_t wave = 0; wave < waves; ++wave) {
    const WaveMoves moves{params, space.list.wave_count, wave};
    if (sizes.is_mx && sizes.has_peers()) {
      launch("dispatch", expand_tokens(moves, space.x_ring, space.dy_ring, stream));
    } else {
      launch(
          "dispatch",
          dispatch_tokens(moves, {own.x, places.received_x, params.x_offset, space.x_ring},
                          {own.dy, places.received_dy, params.dy_offset, space.dy_ring}, stream));
    }
    const auto multiply = [&](const char* what, const ItemRange* range, int index) {
      params.range = range;
      params.next_item = space.next_items + wave * kWaveLaunches + index;
      launch(what, (sizes.is_mx ? launch_mx_backward : launch_backward)(params, Timeline{},
                                                                        clusters, stream));
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

std::string launch_backward_call(const BackwardCall& call, int32_t ordinal, cudaStream_t stream) {
  const BackwardSizes& sizes = call.sizes;
  const PlanShape& plan = sizes.plan;
  const ArenaLayout layout = sizes.arena_layout();
  const Arena* arena = nullptr;
  if (std::string problem = find_peers(call.communicator, layout, &arena); !problem.empty()) {
    return problem;
  }
  const BackwardWorkspace space = lay_out(sizes, call.workspace.data);
  if (call.workspace.bytes < space.bytes) {
    return "the workspace is too small";
  }
  const Device device = device_of(ordinal);
  const bool is_pushed = sizes.directions.reverse_dispatch_push;
  const Places places = find_places(sizes, space, layout, arena);
  BackwardParams params{};
  if (!encode_maps(call, space, &params)) {
    return "the driver refuses the tensor maps of these shapes";
  }
  fill_params(call, space, places, layout, arena, &params);
  params.peers_apart = peers_apart(plan.ranks - 1, device.backward_clusters * kCluster);

  const MeetingTerms terms{.signature = sizes.signature(),
                           .timeout_ns = call.timeout_ns,
                           .kernel_failed = space.kernel_failed,
                           .failed = space.link_failed,
                           .record = device.record};
  count_launched_call();
  Launches launch;
  launch("zero", cudaMemsetAsync(space.zero, 0, space.zero_bytes, stream));
  if (sizes.pulls()) {
    constexpr int kLarge = 0x7f;  // in every byte
    launch("first rows", cudaMemsetAsync(space.list.first_row, kLarge,
                                         sizeof(int32_t) * plan.ranks * plan.tokens, stream));
  }
  if (arena != nullptr) {
    launch("publish",
           publish_gradients(*arena, plan, call.weights, call.slot_rank, {call.x, places.rounded_x},
                             {call.dy, places.rounded_dy}, terms, stream));
    if (launch.failed()) {  // who has not come to the entry must not push
      cudaMemsetAsync(space.link_failed, 1, sizeof(int32_t), stream);
    }
    launch("weights", cudaMemcpyAsync(space.weights, arena->own + layout.choices_offset(),
                                      sizeof(float) * plan.ranks * plan.choices(),
                                      cudaMemcpyDeviceToDevice, stream));
  } else if (sizes.is_mx) {
    const auto round = [&](const uint16_t* from, uint16_t* to) {
      launch("round", round_rows(from, to, plan.tokens, params.hidden, stream));
    };
    round(call.x, places.rounded_x);
    round(call.dy, places.rounded_dy);
  }
  const OwnTokens own = own_tokens(call, places);
  launch("work list", list_backward(plan, params.shape, params.rank, sizes.saved_tiles(),
                                    call.expert_tile, call.row_source,
                                    {.x = {own.x, places.received_x, space.x_ring},
                                     .dy = {own.dy, places.received_dy, space.dy_ring},
                                     .zeros = space.zeros,
                                     .width = sizes.hidden},
                                    space.list, space.link_failed, stream));
  if (sizes.composed) {
    launch_waves(call, space, params, places, device.backward_clusters, stream, launch);
  } else {
    launch("backward", (sizes.is_mx ? launch_mx_backward : launch_backward)(
                           params, timeline_of(ordinal), device.backward_clusters, stream));
  }
  if (arena != nullptr) {
    if (launch.failed()) {  // the peers' slots are not filled
      cudaMemsetAsync(space.kernel_failed, 1, sizeof(int32_t), stream);
    }
    launch("exit", meet_at_exit(*arena, terms, stream));
  }
  launch("sum", weighted_sum({.slots = is_pushed ? places.dx_rows : nullptr,
                              .outputs = places.dx_rows,
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
  launch("router weights", collect_choices({.slots = is_pushed ? places.d_weights : nullptr,
                                            .rows = places.d_weights,
                                            .bases = params.bases,
                                            .rows_offset = layout.numbers_offset(),
                                            .slot_row = call.slot_row,
                                            .slot_rank = call.slot_rank,
                                            .count = plan.choices(),
                                            .out = call.d_weights},
                                           stream));
  const int64_t dw_elements =
      plan.local_experts() * sizes.hidden * sizes.inner * (call.dw_is_f32 ? 2 : 1);
  launch("finish",
         finish({.link_failed = space.link_failed,
                 .kernel_failed = space.kernel_failed,
                 .counts = space.counts,
                 .experts = plan.experts,
                 .results = {{call.dx, plan.tokens * sizes.hidden},
                             {reinterpret_cast<uint16_t*>(call.d_weights), 2 * plan.choices()},
                             {static_cast<uint16_t*>(call.d_gate), dw_elements},
                             {static_cast<uint16_t*>(call.d_up), dw_elements},
                             {static_cast<uint16_t*>(call.d_down), dw_elements}},
                 .kept_plan = nullptr,
                 .record = device.record},
                stream));
  return launch.result();
}

}  // namespace mok
