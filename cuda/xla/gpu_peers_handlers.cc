#include "xla/gpu_peers_handlers.h"

#include "xla/backward_call.h"
#include "xla/ffi/api/ffi.h"
#include "xla/forward_call.h"
#include "xla/peers.h"
#include "xla/plan_call.h"

namespace mok {
namespace {

namespace ffi = xla::ffi;

using Int32Buffer = ffi::Buffer<ffi::S32>;

ffi::Error forward_peers(cudaStream_t stream, int32_t ordinal, Communicators communicators,
                         Bf16Buffer x, Int32Buffer ids, ffi::Buffer<ffi::F32> weights,
                         Bf16Buffer gate, Bf16Buffer up, Bf16Buffer down, ffi::Result<Bf16Buffer> y,
                         WorkspaceBuffer workspace, ffi::RemainingRets kept,
                         ForwardAttributes attributes) {
  const auto communicator = communicator_of(communicators, attributes.rank_groups());
  if (communicator.has_error()) {
    return communicator.error();
  }
  return execute_forward(stream, ordinal, *communicator, x, ids, weights, gate, up, down, y,
                         workspace, kept, attributes);
}

ffi::Error plan_peers(cudaStream_t stream, int32_t ordinal, Communicators communicators,
                      Int32Buffer ids, WorkspaceBuffer workspace, ffi::RemainingRets tables,
                      PlanAttributes attributes) {
  const auto communicator = communicator_of(communicators, attributes.rank_groups());
  if (communicator.has_error()) {
    return communicator.error();
  }
  return execute_plan(stream, ordinal, *communicator, ids, workspace, tables, attributes);
}

ffi::Error backward_peers(cudaStream_t stream, int32_t ordinal, Communicators communicators,
                          Bf16Buffer x, Bf16Buffer dy, ffi::Buffer<ffi::F32> weights,
                          Bf16Buffer gate, Bf16Buffer up, Bf16Buffer down, Bf16Buffer saved,
                          Int32Buffer row_source, Int32Buffer expert_tile, Int32Buffer slot_rank,
                          Int32Buffer slot_row, ffi::RemainingArgs replay,
                          ffi::Result<Bf16Buffer> dx, ffi::Result<ffi::Buffer<ffi::F32>> d_weights,
                          ffi::Result<ffi::AnyBuffer> d_gate, ffi::Result<ffi::AnyBuffer> d_up,
                          ffi::Result<ffi::AnyBuffer> d_down,
                          ffi::Result<ffi::Buffer<ffi::BF16>> spent, WorkspaceBuffer workspace,
                          BackwardAttributes attributes) {
  const auto communicator = communicator_of(communicators, attributes.rank_groups());
  if (communicator.has_error()) {
    return communicator.error();
  }
  return execute_backward(stream, ordinal, *communicator, x, dy, weights, gate, up, down, saved,
                          row_source, expert_tile, slot_rank, slot_row, replay, dx, d_weights,
                          d_gate, d_up, d_down, spent, workspace, attributes);
}

template <typename Attributes>
auto bind_prepare() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>()
      .Ctx<ffi::Extension<Collectives>>()
      .Attrs<Attributes>();
}

template <typename Attributes>
auto bind_initialize() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::Extension<Collectives>>()
      .Attrs<Attributes>();
}

auto bind_launches() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::Extension<Collectives>>();
}

XLA_FFI_DEFINE_HANDLER(prepare_forward_handler, prepare<ForwardAttributes>,
                       bind_prepare<ForwardAttributes>());
XLA_FFI_DEFINE_HANDLER(initialize_forward_handler, initialize<ForwardAttributes>,
                       bind_initialize<ForwardAttributes>());
XLA_FFI_DEFINE_HANDLER(forward_handler, forward_peers, bind_forward(bind_launches()),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(prepare_backward_handler, prepare<BackwardAttributes>,
                       bind_prepare<BackwardAttributes>());
XLA_FFI_DEFINE_HANDLER(initialize_backward_handler, initialize<BackwardAttributes>,
                       bind_initialize<BackwardAttributes>());
XLA_FFI_DEFINE_HANDLER(backward_handler, backward_peers, bind_backward(bind_launches()),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(prepare_plan_handler, prepare<PlanAttributes>,
                       bind_prepare<PlanAttributes>());
XLA_FFI_DEFINE_HANDLER(initialize_plan_handler, initialize<PlanAttributes>,
                       bind_initialize<PlanAttributes>());
XLA_FFI_DEFINE_HANDLER(plan_handler, plan_peers, bind_plan(bind_launches()),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace mok

extern "C" {

XLA_FFI_Error* MokForwardPeersPrepare(XLA_FFI_CallFrame* frame) {
  return mok::prepare_forward_handler(frame);
}
XLA_FFI_Error* MokForwardPeersInitialize(XLA_FFI_CallFrame* frame) {
  return mok::initialize_forward_handler(frame);
}
XLA_FFI_Error* MokForwardPeersExecute(XLA_FFI_CallFrame* frame) {
  return mok::forward_handler(frame);
}
XLA_FFI_Error* MokBackwardPeersPrepare(XLA_FFI_CallFrame* frame) {
  return mok::prepare_backward_handler(frame);
}
XLA_FFI_Error* MokBackwardPeersInitialize(XLA_FFI_CallFrame* frame) {
  return mok::initialize_backward_handler(frame);
}
XLA_FFI_Error* MokBackwardPeersExecute(XLA_FFI_CallFrame* frame) {
  return mok::backward_handler(frame);
}
XLA_FFI_Error* MokPlanPeersPrepare(XLA_FFI_CallFrame* frame) {
  return mok::prepare_plan_handler(frame);
}
XLA_FFI_Error* MokPlanPeersInitialize(XLA_FFI_CallFrame* frame) {
  return mok::initialize_plan_handler(frame);
}
XLA_FFI_Error* MokPlanPeersExecute(XLA_FFI_CallFrame* frame) { return mok::plan_handler(frame); }

}  // extern "C"
