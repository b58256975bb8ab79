#include "xla/gpu_forward.h"

#include <cuda_runtime_api.h>

#include <bit>
#include <cmath>
#include <string>
#include <utility>

#include "link/arena.h"
#include "link/exchange.h"
#include "sm90/finish.h"
#include "sm90/tensor_map.h"
#include "sm90/weighted_sum.h"
#include "xla/ffi/api/ffi.h"
#include "xla/gpu_composed.h"
#include "xla/gpu_device.h"
#include "xla/launches.h"
#include "xla/peers.h"
#include "xla/plan_tables.h"
#include "xla/workspace.h"

namespace mok {
namespace {

namespace ffi = xla::ffi;
using namespace mok::sm90;

using Bf16Buffer = ffi::Buffer<ffi::BF16>;

// Everything static: stages before Execute see no operands.
struct ForwardAttributes {
  int32_t ranks;
  int64_t tokens;
  int32_t top_k;
  int32_t experts;
  int64_t hidden;
  int64_t inner;
  int32_t tile_rows;
  int64_t chunk_rows;
  int64_t ring_rows;
  bool dispatch_push;
  bool combine_push;
  bool composed;
  float clamp;
  double timeout_s;
  ffi::Span<const int64_t> groups;  // of ranks: positions in the mesh, `ranks` each

  RankGroups rank_groups() const { return {ranks, groups}; }
  uint64_t timeout_ns() const { return static_cast<uint64_t>(timeout_s * 1e9); }
};

ForwardShape forward_shape(const ForwardAttributes& attributes) {
  return make_forward_shape({attributes.ranks, attributes.tokens, attributes.top_k,
                             attributes.experts, attributes.tile_rows, attributes.chunk_rows},
                            {attributes.dispatch_push, attributes.combine_push},
                            attributes.composed, attributes.ring_rows, attributes.hidden,
                            attributes.inner);
}

// The clamp and its neighbours among bf16 numbers, which are the f32 ones cut after 16 bits.
Clamp clamp_at(float limit) {
  if (std::isinf(limit)) {
    return {limit, limit, limit};
  }
  const uint32_t bits = std::bit_cast<uint32_t>(limit);
  const uint32_t below = (bits - 1) & 0xffff0000u;
  return {limit, std::bit_cast<float>(below), std::bit_cast<float>(below + 0x10000u)};
}

bool encode_maps(const ForwardShape& shape, const void* gate, const void* up, const void* down,
                 const void* ring, ForwardParams* params) {
  const int64_t experts = shape.plan.local_experts();
  return encode_matrix(&params->gate, gate, experts * shape.hidden, shape.inner, kBlockDepth) &&
         encode_matrix(&params->up, up, experts * shape.hidden, shape.inner, kBlockDepth) &&
         encode_matrix(&params->down, down, experts * shape.inner, shape.hidden, kBlockDepth) &&
         encode_matrix(&params->hidden_tiles, ring, shape.ring_rows, shape.inner, kTileRows) &&
         encode_matrix(&params->hidden_warps, ring, shape.ring_rows, shape.inner, kWarpRows);
}

// `kept` is empty, or what the backward pass needs: pre-activations of some tiles and a spare one,
// which only the CPU's layer writes, and the plan's tables.
ffi::Error run(cudaStream_t stream, int32_t ordinal, const Arena* arena, Bf16Buffer x,
               ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights, Bf16Buffer w_gate,
               Bf16Buffer w_up, Bf16Buffer w_down, ffi::ResultBuffer<ffi::BF16> y,
               ffi::ResultBuffer<ffi::U8> workspace, ffi::RemainingRets kept,
               const ForwardAttributes& attributes) {
  const ForwardShape shape = forward_shape(attributes);
  const Workspace space = lay_out(shape, reinterpret_cast<char*>(workspace->typed_data()));
  if (static_cast<int64_t>(workspace->size_bytes()) < space.bytes) {
    return failure("the workspace is too small");
  }
  const PlanTables tables = kept.size() == 0 ? space.tables : plan_tables(kept, 1);
  const ArenaLayout layout = arena_layout(shape);
  const Device device = device_of(ordinal);
  const auto* const own_x = reinterpret_cast<const uint16_t*>(x.typed_data());
  auto* const out = reinterpret_cast<uint16_t*>(y->typed_data());
  const int32_t rank = arena == nullptr ? 0 : arena->rank;
  const auto part_of_arena = [&](int64_t offset) {
    return reinterpret_cast<uint16_t*>(arena->own + offset);
  };
  // Where this rank finds its tokens' output rows, or leaves those of its experts to be found.
  uint16_t* slots = space.own_slots;
  uint16_t* outputs = space.outputs;
  uint16_t* received = space.received;
  if (arena != nullptr) {
    (shape.directions.combine_push ? slots : outputs) = part_of_arena(layout.combine());
    if (shape.directions.dispatch_push) {
      received = part_of_arena(layout.dispatch());
    }
  }
  const uint64_t timeout_ns = attributes.timeout_ns();

  ForwardParams params{};
  if (!encode_maps(shape, w_gate.typed_data(), w_up.typed_data(), w_down.typed_data(),
                   space.hidden_ring, &params)) {
    return failure("the driver refuses the tensor maps of these shapes");
  }
  params.x = own_x;
  params.received = received;
  const auto ring_rows = static_cast<int32_t>(shape.ring_rows);
  params.dispatched = {space.dispatched, ring_rows};
  params.outputs = space.output_ring != nullptr
                       ? RowRing{space.output_ring, ring_rows}
                       : RowRing{outputs, static_cast<int32_t>(shape.plan.max_rows())};
  params.own_slots = space.own_slots;
  params.bases = arena == nullptr ? nullptr : arena->bases;
  params.x_offset = layout.dispatch();
  params.slots_offset = layout.combine();
  params.row_source = tables.row_source;
  params.items = space.list.items;
  params.range = space.list.all_items;
  params.tile_count = space.list.tile_count;
  if (kept.size() > 0) {
    const auto saved = *kept.get<Bf16Buffer>(0);
    params.saved = reinterpret_cast<uint16_t*>(saved->typed_data());
    params.saved_tiles = static_cast<int32_t>(saved->dimensions().front()) - 1;
  }
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
  params.tokens = static_cast<int32_t>(shape.plan.tokens);
  params.top_k = shape.plan.top_k;
  params.choices = static_cast<int32_t>(shape.plan.choices());
  params.ring_tiles = shape.work.ring_tiles;
  params.gate_up_columns = shape.work.gate_up_columns;
  params.down_columns = shape.work.down_columns;
  params.clamp = clamp_at(attributes.clamp);
  params.timeout_ns = timeout_ns;

  count_launched_call();
  Launches launch;
  launch("zero", cudaMemsetAsync(space.zero, 0, space.zero_bytes, stream));
  const int32_t* routes = ids.typed_data();
  if (arena != nullptr) {
    launch("publish", publish(*arena, layout, shape.plan, ids.typed_data(), own_x, stream));
    launch("entry barrier", barrier(*arena, layout, Meeting::kEntry, timeout_ns,
                                    space.kernel_failed, space.link_failed, device.record, stream));
    launch("routes", copy_routes(*arena, layout, space.link_failed, space.routes, stream));
    routes = space.routes;
  }
  launch("plan",
         build_plan(shape.plan, rank,
                    {.routes = routes, .scratch = space.plan_scratch, .to_pull = space.to_pull},
                    tables, stream));
  launch("work list", list_work(shape.plan, shape.work, tables.expert_tile, space.list, stream));
  if (shape.composed) {
    launch_waves(shape, space, params, device.clusters, stream, launch);
  } else {
    launch("forward", launch_forward(params, device.clusters, stream));
  }
  if (arena != nullptr) {
    if (launch.failed()) {  // the peers' slots are not filled
      cudaMemsetAsync(space.kernel_failed, 1, sizeof(int32_t), stream);
    }
    launch("exit barrier", barrier(*arena, layout, Meeting::kExit, timeout_ns, space.kernel_failed,
                                   space.link_failed, device.record, stream));
  }
  launch("weighted sum", weighted_sum({.slots = slots,
                                       .outputs = outputs,
                                       .bases = params.bases,
                                       .outputs_offset = layout.combine(),
                                       .slot_row = tables.slot_row,
                                       .slot_rank = tables.slot_rank,
                                       .weights = weights.typed_data(),
                                       .out = out,
                                       .tokens = shape.plan.tokens,
                                       .top_k = shape.plan.top_k,
                                       .width = params.hidden},
                                      stream));
  launch("finish",
         finish({.link_failed = space.link_failed,
                 .kernel_failed = space.kernel_failed,
                 .counts = tables.counts,
                 .experts = shape.plan.experts,
                 .out = out,
                 .elements = shape.plan.tokens * shape.hidden,
                 .kept = params.saved,
                 .kept_elements = int64_t{params.saved_tiles} * 2 * kTileRows * shape.inner,
                 .record = device.record},
                stream));
  return launch.result();
}

ffi::Error initialize_alone(int32_t ordinal) { return failure_if(prepare_device(ordinal)); }

ffi::Error execute_alone(cudaStream_t stream, int32_t ordinal, Bf16Buffer x,
                         ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights,
                         Bf16Buffer w_gate, Bf16Buffer w_up, Bf16Buffer w_down,
                         ffi::ResultBuffer<ffi::BF16> y, ffi::ResultBuffer<ffi::U8> workspace,
                         ffi::RemainingRets kept, ForwardAttributes attributes) {
  return run(stream, ordinal, nullptr, x, ids, weights, w_gate, w_up, w_down, y, workspace, kept,
             attributes);
}

ffi::Error prepare_peers(Communicators communicators, ForwardAttributes attributes) {
  return request_communicator(communicators, attributes.rank_groups());
}

ffi::Error initialize_peers(cudaStream_t stream, int32_t ordinal, Communicators communicators,
                            ForwardAttributes attributes) {
  return make_arena(communicators, attributes.rank_groups(), ordinal,
                    arena_layout(forward_shape(attributes)), attributes.timeout_ns(), stream);
}

ffi::Error execute_peers(cudaStream_t stream, int32_t ordinal, Communicators communicators,
                         Bf16Buffer x, ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights,
                         Bf16Buffer w_gate, Bf16Buffer w_up, Bf16Buffer w_down,
                         ffi::ResultBuffer<ffi::BF16> y, ffi::ResultBuffer<ffi::U8> workspace,
                         ffi::RemainingRets kept, ForwardAttributes attributes) {
  const auto arena =
      arena_of(communicators, attributes.rank_groups(), arena_layout(forward_shape(attributes)));
  if (arena.has_error()) {
    return arena.error();
  }
  return run(stream, ordinal, *arena, x, ids, weights, w_gate, w_up, w_down, y, workspace, kept,
             attributes);
}

}  // namespace
}  // namespace mok

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    mok::ForwardAttributes, xla::ffi::StructMember<int32_t>("ranks"),
    xla::ffi::StructMember<int64_t>("tokens"), xla::ffi::StructMember<int32_t>("top_k"),
    xla::ffi::StructMember<int32_t>("experts"), xla::ffi::StructMember<int64_t>("hidden"),
    xla::ffi::StructMember<int64_t>("inner"), xla::ffi::StructMember<int32_t>("tile_rows"),
    xla::ffi::StructMember<int64_t>("chunk_rows"), xla::ffi::StructMember<int64_t>("ring_rows"),
    xla::ffi::StructMember<bool>("dispatch_push"), xla::ffi::StructMember<bool>("combine_push"),
    xla::ffi::StructMember<bool>("composed"), xla::ffi::StructMember<float>("clamp"),
    xla::ffi::StructMember<double>("timeout_s"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"));

namespace mok {
namespace {

template <typename Binding>
auto bind_forward(Binding binding) {
  return std::move(binding)
      .template Arg<Bf16Buffer>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::Buffer<ffi::F32>>()
      .template Arg<Bf16Buffer>()
      .template Arg<Bf16Buffer>()
      .template Arg<Bf16Buffer>()
      .template Ret<Bf16Buffer>()
      .template Ret<ffi::Buffer<ffi::U8>>()
      .RemainingRets()
      .template Attrs<ForwardAttributes>();
}

XLA_FFI_DEFINE_HANDLER(
    initialize_alone_handler, initialize_alone,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER(execute_alone_handler, execute_alone,
                       bind_forward(ffi::Ffi::Bind()
                                        .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                        .Ctx<ffi::DeviceOrdinal>()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(prepare_peers_handler, prepare_peers,
                       ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>()
                           .Ctx<ffi::Extension<Collectives>>()
                           .Attrs<ForwardAttributes>());
XLA_FFI_DEFINE_HANDLER(initialize_peers_handler, initialize_peers,
                       ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::Extension<Collectives>>()
                           .Attrs<ForwardAttributes>());
XLA_FFI_DEFINE_HANDLER(execute_peers_handler, execute_peers,
                       bind_forward(ffi::Ffi::Bind()
                                        .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                        .Ctx<ffi::DeviceOrdinal>()
                                        .Ctx<ffi::Extension<Collectives>>()),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace mok

extern "C" {

XLA_FFI_Error* MokForwardAloneInitialize(XLA_FFI_CallFrame* frame) {
  return mok::initialize_alone_handler(frame);
}
XLA_FFI_Error* MokForwardAloneExecute(XLA_FFI_CallFrame* frame) {
  return mok::execute_alone_handler(frame);
}
XLA_FFI_Error* MokForwardPeersPrepare(XLA_FFI_CallFrame* frame) {
  return mok::prepare_peers_handler(frame);
}
XLA_FFI_Error* MokForwardPeersInitialize(XLA_FFI_CallFrame* frame) {
  return mok::initialize_peers_handler(frame);
}
XLA_FFI_Error* MokForwardPeersExecute(XLA_FFI_CallFrame* frame) {
  return mok::execute_peers_handler(frame);
}

}  // extern "C"
