#include "xla/gpu_plan.h"

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "link/arena.h"
#include "link/exchange.h"
#include "sm90/finish.h"
#include "sm90/plan.h"
#include "xla/ffi/api/ffi.h"
#include "xla/gpu_device.h"
#include "xla/launches.h"
#include "xla/parts.h"
#include "xla/peers.h"
#include "xla/plan_tables.h"

namespace mok {
namespace {

namespace ffi = xla::ffi;

using Int32Buffer = ffi::Buffer<ffi::S32>;

// Everything static: stages before Execute see no operands.
struct PlanAttributes {
  int32_t ranks;
  int64_t tokens;
  int32_t top_k;
  int32_t experts;
  int32_t tile_rows;
  int64_t chunk_rows;
  double timeout_s;
  ffi::Span<const int64_t> groups;  // of ranks: positions in the mesh, `ranks` each

  PlanShape shape() const { return {ranks, tokens, top_k, experts, tile_rows, chunk_rows}; }
  RankGroups rank_groups() const { return {ranks, groups}; }
  uint64_t timeout_ns() const { return static_cast<uint64_t>(timeout_s * 1e9); }
};

// Of a call whose routes come gathered: there is nobody to meet.
struct GatheredPlanAttributes {
  int32_t ranks;
  int64_t tokens;
  int32_t top_k;
  int32_t experts;
  int32_t tile_rows;
  int64_t chunk_rows;

  PlanShape shape() const { return {ranks, tokens, top_k, experts, tile_rows, chunk_rows}; }
};

// Routes only.
ArenaLayout arena_layout(const PlanShape& shape) {
  return {.ranks = shape.ranks,
          .choices = shape.choices(),
          .tokens = shape.tokens,
          .width = 0,
          .directions = {},
          .output_rows = 0};
}

struct Workspace {
  int32_t* scratch;  // [plan_scratch_words]
  int32_t* routes;   // [ranks, tokens, top_k]; only with peers, and not if XLA has gathered them
  int32_t* link_failed;
  int32_t* kernel_failed;  // set if a launch has failed: no kernel of this call waits for another
  int64_t bytes;
};

Workspace lay_out(const PlanShape& shape, char* base) {
  Parts parts(base);
  Workspace space{};
  space.scratch = parts.take<int32_t>(sm90::plan_scratch_words(shape));
  space.routes = shape.ranks == 1 ? nullptr : parts.take<int32_t>(shape.ranks * shape.choices());
  space.link_failed = parts.take<int32_t>(1);
  space.kernel_failed = parts.take<int32_t>(1);
  space.bytes = parts.used();
  return space;
}

ffi::ErrorOr<Workspace> workspace_in(ffi::ResultBuffer<ffi::U8> memory, const PlanShape& shape) {
  const Workspace space = lay_out(shape, reinterpret_cast<char*>(memory->typed_data()));
  if (static_cast<int64_t>(memory->size_bytes()) < space.bytes) {
    return ffi::Unexpected(failure("the workspace is too small"));
  }
  return space;
}

void clear_fault_words(Launches& launch, const Workspace& space, cudaStream_t stream) {
  launch("fault words", cudaMemsetAsync(space.link_failed, 0, sizeof(int32_t), stream));
  launch("fault words", cudaMemsetAsync(space.kernel_failed, 0, sizeof(int32_t), stream));
}

// The tables of `rank`, or of the one that `source.rank` points to.
void fill_tables(Launches& launch, const PlanShape& shape, int32_t rank,
                 const sm90::PlanSource& source, const PlanTables& tables, const Workspace& space,
                 CallRecord* record, cudaStream_t stream) {
  launch("plan", sm90::build_plan(shape, rank, source, tables, stream));
  launch("finish", sm90::finish({.link_failed = space.link_failed,
                                 .kernel_failed = space.kernel_failed,
                                 .counts = tables.counts,
                                 .experts = shape.experts,
                                 .out = nullptr,
                                 .elements = 0,
                                 .kept = nullptr,
                                 .kept_elements = 0,
                                 .record = record},
                                stream));
}

ffi::Error run(cudaStream_t stream, int32_t ordinal, const Arena* arena, Int32Buffer ids,
               ffi::ResultBuffer<ffi::U8> workspace, ffi::RemainingRets results,
               const PlanAttributes& attributes) {
  const PlanShape shape = attributes.shape();
  const auto space_or_error = workspace_in(workspace, shape);
  if (space_or_error.has_error()) {
    return space_or_error.error();
  }
  const Workspace space = *space_or_error;
  CallRecord* const record = device_of(ordinal).record;

  count_launched_call();
  Launches launch;
  clear_fault_words(launch, space, stream);
  const int32_t* routes = ids.typed_data();
  int32_t rank = 0;
  if (arena != nullptr) {
    const ArenaLayout layout = arena_layout(shape);
    const auto meet = [&](const char* what, Meeting meeting) {
      launch(what, barrier(*arena, layout, meeting, attributes.timeout_ns(), space.kernel_failed,
                           space.link_failed, record, stream));
    };
    launch("publish", publish(*arena, layout, shape, routes, /*x=*/nullptr, stream));
    meet("entry barrier", Meeting::kEntry);
    launch("routes", copy_routes(*arena, layout, space.link_failed, space.routes, stream));
    // From here on a peer's next call may overwrite the routes in this rank's arena. Only now is it
    // known whether one has done so before, having waited in vain for this rank.
    if (launch.failed()) {  // the peers have not got this rank's routes
      cudaMemsetAsync(space.kernel_failed, 1, sizeof(int32_t), stream);
    }
    meet("exit barrier", Meeting::kExit);
    launch("mask",
           mask_routes_if(space.link_failed, space.routes, shape.ranks * shape.choices(), stream));
    routes = space.routes;
    rank = arena->rank;
  }
  fill_tables(launch, shape, rank, {.routes = routes, .scratch = space.scratch, .to_pull = nullptr},
              plan_tables(results), space, record, stream);
  return launch.result();
}

// ids is every rank's, [ranks, tokens, top_k]; place is [group, rank], since one program is that of
// all ranks.
ffi::Error execute_of_gathered_routes(cudaStream_t stream, int32_t ordinal, Int32Buffer ids,
                                      Int32Buffer place, ffi::ResultBuffer<ffi::U8> workspace,
                                      ffi::RemainingRets results,
                                      GatheredPlanAttributes attributes) {
  const PlanShape shape = attributes.shape();
  const auto space = workspace_in(workspace, shape);
  if (space.has_error()) {
    return space.error();
  }
  Launches launch;
  clear_fault_words(launch, *space, stream);
  fill_tables(launch, shape, /*rank=*/-1,
              {.routes = ids.typed_data(),
               .scratch = space->scratch,
               .to_pull = nullptr,
               .rank = place.typed_data() + 1},
              plan_tables(results), *space, device_of(ordinal).record, stream);
  return launch.result();
}

ffi::Error initialize_alone(int32_t ordinal) { return failure_if(prepare_device(ordinal)); }

ffi::Error execute_alone(cudaStream_t stream, int32_t ordinal, Int32Buffer ids,
                         ffi::ResultBuffer<ffi::U8> workspace, ffi::RemainingRets results,
                         PlanAttributes attributes) {
  return run(stream, ordinal, nullptr, ids, workspace, results, attributes);
}

ffi::Error prepare_peers(Communicators communicators, PlanAttributes attributes) {
  return request_communicator(communicators, attributes.rank_groups());
}

ffi::Error initialize_peers(cudaStream_t stream, int32_t ordinal, Communicators communicators,
                            PlanAttributes attributes) {
  return make_arena(communicators, attributes.rank_groups(), ordinal,
                    arena_layout(attributes.shape()), attributes.timeout_ns(), stream);
}

ffi::Error execute_peers(cudaStream_t stream, int32_t ordinal, Communicators communicators,
                         Int32Buffer ids, ffi::ResultBuffer<ffi::U8> workspace,
                         ffi::RemainingRets results, PlanAttributes attributes) {
  const auto arena =
      arena_of(communicators, attributes.rank_groups(), arena_layout(attributes.shape()));
  if (arena.has_error()) {
    return arena.error();
  }
  return run(stream, ordinal, *arena, ids, workspace, results, attributes);
}

}  // namespace

int64_t plan_workspace_bytes(const PlanShape& shape) { return lay_out(shape, nullptr).bytes; }

}  // namespace mok

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    mok::PlanAttributes, xla::ffi::StructMember<int32_t>("ranks"),
    xla::ffi::StructMember<int64_t>("tokens"), xla::ffi::StructMember<int32_t>("top_k"),
    xla::ffi::StructMember<int32_t>("experts"), xla::ffi::StructMember<int32_t>("tile_rows"),
    xla::ffi::StructMember<int64_t>("chunk_rows"), xla::ffi::StructMember<double>("timeout_s"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(mok::GatheredPlanAttributes,
                                      xla::ffi::StructMember<int32_t>("ranks"),
                                      xla::ffi::StructMember<int64_t>("tokens"),
                                      xla::ffi::StructMember<int32_t>("top_k"),
                                      xla::ffi::StructMember<int32_t>("experts"),
                                      xla::ffi::StructMember<int32_t>("tile_rows"),
                                      xla::ffi::StructMember<int64_t>("chunk_rows"));

namespace mok {
namespace {

template <typename Binding>
auto bind_plan(Binding binding) {
  return std::move(binding)
      .template Arg<Int32Buffer>()
      .template Ret<ffi::Buffer<ffi::U8>>()
      .RemainingRets()
      .template Attrs<PlanAttributes>();
}

XLA_FFI_DEFINE_HANDLER(
    initialize_alone_handler, initialize_alone,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER(
    execute_alone_handler, execute_alone,
    bind_plan(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>()),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(execute_of_gathered_routes_handler, execute_of_gathered_routes,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .Ret<ffi::Buffer<ffi::U8>>()
                           .RemainingRets()
                           .Attrs<GatheredPlanAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(prepare_peers_handler, prepare_peers,
                       ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>()
                           .Ctx<ffi::Extension<Collectives>>()
                           .Attrs<PlanAttributes>());
XLA_FFI_DEFINE_HANDLER(initialize_peers_handler, initialize_peers,
                       ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::Extension<Collectives>>()
                           .Attrs<PlanAttributes>());
XLA_FFI_DEFINE_HANDLER(execute_peers_handler, execute_peers,
                       bind_plan(ffi::Ffi::Bind()
                                     .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                     .Ctx<ffi::DeviceOrdinal>()
                                     .Ctx<ffi::Extension<Collectives>>()),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace mok

extern "C" {

XLA_FFI_Error* MokPlanAloneInitialize(XLA_FFI_CallFrame* frame) {
  return mok::initialize_alone_handler(frame);
}
XLA_FFI_Error* MokPlanAloneExecute(XLA_FFI_CallFrame* frame) {
  return mok::execute_alone_handler(frame);
}
XLA_FFI_Error* MokPlanOfGatheredRoutesInitialize(XLA_FFI_CallFrame* frame) {
  return mok::initialize_alone_handler(frame);
}
XLA_FFI_Error* MokPlanOfGatheredRoutesExecute(XLA_FFI_CallFrame* frame) {
  return mok::execute_of_gathered_routes_handler(frame);
}
XLA_FFI_Error* MokPlanPeersPrepare(XLA_FFI_CallFrame* frame) {
  return mok::prepare_peers_handler(frame);
}
XLA_FFI_Error* MokPlanPeersInitialize(XLA_FFI_CallFrame* frame) {
  return mok::initialize_peers_handler(frame);
}
XLA_FFI_Error* MokPlanPeersExecute(XLA_FFI_CallFrame* frame) {
  return mok::execute_peers_handler(frame);
}

}  // extern "C"
