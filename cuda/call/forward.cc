#include "call/forward.h"

#include "call/clamp.h"
#include "call/device.h"
#include "call/launches.h"
#include "call/peers.h"
#include "call/timeline.h"
#include "call/waves.h"
#include "link/exchange.h"
#include "sm90/finish.h"
#include "sm90/pull_share.h"
#include "sm90/round_rows.h"
#include "sm90/tensor_map.h"
#include "sm90/weighted_sum.h"

namespace mok {
namespace {

using namespace mok::sm90;

bool encode_maps(const ForwardCall& call, const uint16_t* ring, ForwardParams* params) {
  const ForwardShape& shape = call.shape;
  const int64_t experts = shape.plan.local_experts();
  return encode_matrix(&params->gate, call.gate, experts * shape.hidden, shape.inner,
                       kBlockDepth) &&
         encode_matrix(&params->up, call.up, experts * shape.hidden, shape.inner, kBlockDepth) &&
         encode_matrix(&params->down, call.down, experts * shape.inner, shape.hidden,
                       kBlockDepth) &&
         encode_matrix(&params->hidden_tiles, ring, shape.ring_rows, shape.inner, kTileRows) &&
         encode_matrix(&params->hidden_warps, ring, shape.ring_rows, shape.inner, kWarpRows);
}

}  // namespace

std::string launch_forward_call(const ForwardCall& call, int32_t ordinal, cudaStream_t stream) {
  const ForwardShape& shape = call.shape;
  if (shape.plan.tile_rows != kTileRows) {
    return "the kernels' tiles have " + std::to_string(kTileRows) + " rows";
  }
  const ArenaLayout layout = shape.arena_layout();
  const Arena* arena = nullptr;
  if (std::string problem = find_peers(call.communicator, layout, &arena); !problem.empty()) {
    return problem;
  }
  const Workspace space = lay_out(shape, call.workspace.data);
  if (call.workspace.bytes < space.bytes) {
    return "the workspace is too small";
  }
  const PlanTables& tables = shape.keeps_plan ? call.tables : space.tables;
  const Device device = device_of(ordinal);
  const int32_t rank = arena == nullptr ? 0 : arena->rank;
  const auto part_of_arena = [&](int64_t offset) {
    return reinterpret_cast<uint16_t*>(arena->own + offset);
  };
  // Where this rank finds its tokens' output rows, or leaves those of its experts to be found.
  uint16_t* slots = space.own_slots;
  uint16_t* outputs = space.outputs;
  uint16_t* received = space.received;
  if (arena != nullptr) {
    (shape.directions.combine_push ? slots : outputs) = part_of_arena(layout.rows_offset());
    if (shape.directions.dispatch_push && !shape.is_mx) {
      received = part_of_arena(layout.x_offset());
    }
  }
  // This rank's tokens in MXFP8: beside those received, unless all are expanded wave by wave.
  uint16_t* rounded = space.rounded;
  if (shape.is_mx && received != nullptr) {
    rounded = received + rank * shape.plan.tokens * shape.hidden;
  }

  ForwardParams params{};
  if (!encode_maps(call, space.hidden_ring, &params)) {
    return "the driver refuses the tensor maps of these shapes";
  }
  params.x = shape.is_mx ? rounded : call.x;
  params.received = received;
  const auto ring_rows = static_cast<int32_t>(shape.ring_rows);
  params.dispatched = {space.dispatched, ring_rows};
  params.outputs = space.output_ring != nullptr
                       ? RowRing{space.output_ring, ring_rows}
                       : RowRing{outputs, static_cast<int32_t>(shape.plan.max_rows())};
  params.own_slots = space.own_slots;
  params.bases = arena == nullptr ? nullptr : arena->bases;
  params.x_offset = layout.x_offset();
  params.x_is_pushed = layout.x_is_pushed;
  params.slots_offset = layout.rows_offset();
  params.zeros = space.zeros;
  params.row_source = tables.row_source;
  params.items = space.list.items;
  params.range = space.list.all_items;
  params.tile_count = space.list.tile_count;
  params.saved = call.saved;
  params.saved_tiles = call.saved_tiles;
  params.to_pull = space.to_pull;
  params.pulled = space.pulled;
  params.next_item = space.next_items;
  params.hidden_ready = space.hidden_ready;
  params.down_done = space.down_done;
  params.fault = space.kernel_failed;
  params.hidden = static_cast<int32_t>(shape.hidden);
  params.inner = static_cast<int32_t>(shape.inner);
  params.ranks = shape.plan.ranks;
  params.rank = rank;
  params.peers_apart = peers_apart(shape.plan.ranks - 1, device.clusters * kCluster);
  params.tokens = static_cast<int32_t>(shape.plan.tokens);
  params.top_k = shape.plan.top_k;
  params.choices = static_cast<int32_t>(shape.plan.choices());
  params.ring_tiles = shape.work.ring_tiles;
  params.gate_up_columns = shape.work.gate_up_columns;
  params.down_columns = shape.work.down_columns;
  params.clamp = clamp_at(call.clamp);
  params.timeout_ns = call.timeout_ns;

  const MeetingTerms terms{.signature = shape.signature(),
                           .timeout_ns = call.timeout_ns,
                           .kernel_failed = space.kernel_failed,
                           .failed = space.link_failed,
                           .record = device.record};
  count_launched_call();
  Launches launch;
  launch("zero", cudaMemsetAsync(space.zero, 0, space.zero_bytes, stream));
  PlanSource source{.routes = call.ids, .scratch = space.plan_scratch, .to_pull = space.to_pull};
  if (arena != nullptr) {
    launch("publish",
           publish_tokens(*arena, shape.plan, call.ids, {call.x, rounded}, terms, stream));
    if (launch.failed()) {  // who has not come to the entry must not push
      cudaMemsetAsync(space.link_failed, 1, sizeof(int32_t), stream);
    }
    source.routes = reinterpret_cast<const int32_t*>(arena->own + layout.choices_offset());
    source.copy = space.routes;
    source.failed = space.link_failed;
  } else if (shape.is_mx) {
    launch("round", round_rows(call.x, rounded, shape.plan.tokens, params.hidden, stream));
  }
  launch("plan", build_plan(shape.plan, rank, source, tables, stream));
  launch("work list", list_work(shape.plan, shape.work, tables.expert_tile, space.list, stream));
  if (shape.composed) {
    launch_waves(shape, space, params, device.clusters, stream, launch);
  } else {
    launch("forward", (shape.is_mx ? launch_mx_forward : launch_forward)(
                          params, timeline_of(ordinal), device.clusters, stream));
  }
  if (arena != nullptr) {
    if (launch.failed()) {  // the peers' slots are not filled
      cudaMemsetAsync(space.kernel_failed, 1, sizeof(int32_t), stream);
    }
    launch("exit", meet_at_exit(*arena, terms, stream));
  }
  launch("weighted sum", weighted_sum({.slots = slots,
                                       .outputs = outputs,
                                       .bases = params.bases,
                                       .outputs_offset = layout.rows_offset(),
                                       .slot_row = tables.slot_row,
                                       .slot_rank = tables.slot_rank,
                                       .weights = call.weights,
                                       .out = call.y,
                                       .tokens = shape.plan.tokens,
                                       .top_k = shape.plan.top_k,
                                       .width = params.hidden},
                                      stream));
  launch("finish",
         finish({.link_failed = space.link_failed,
                 .kernel_failed = space.kernel_failed,
                 .counts = tables.counts,
                 .experts = shape.plan.experts,
                 .results = {{call.y, shape.plan.tokens * shape.hidden},
                             {call.saved, int64_t{call.saved_tiles} * 2 * kTileRows * shape.inner}},
                 .kept_plan = shape.keeps_plan ? tables.expert_tile : nullptr,
                 .record = device.record},
                stream));
  return launch.result();
}

}  // namespace mok
