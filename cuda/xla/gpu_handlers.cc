#include "xla/gpu_handlers.h"

#include "call/device.h"
#include "call/mx.h"
#include "call/weighted_sum.h"
#include "xla/backward_call.h"
#include "xla/errors.h"
#include "xla/ffi/api/ffi.h"
#include "xla/forward_call.h"
#include "xla/memory.h"
#include "xla/mx_call.h"
#include "xla/plan_call.h"
#include "xla/plan_tables.h"

namespace mok {
namespace {

namespace ffi = xla::ffi;

using Int32Buffer = ffi::Buffer<ffi::S32>;

// Those of `PlanAttributes` that a call has whose routes come gathered.
struct GatheredPlanAttributes {
  int32_t ranks;
  int64_t tokens;
  int32_t top_k;
  int32_t experts;
  int32_t tile_rows;
  int64_t chunk_rows;

  PlanShape shape() const { return {ranks, tokens, top_k, experts, tile_rows, chunk_rows}; }
};

ffi::Error initialize(int32_t ordinal) { return failure_if(prepare_device(ordinal)); }

ffi::Error forward_alone(cudaStream_t stream, int32_t ordinal, Bf16Buffer x, Int32Buffer ids,
                         ffi::Buffer<ffi::F32> weights, Bf16Buffer gate, Bf16Buffer up,
                         Bf16Buffer down, ffi::Result<Bf16Buffer> y, WorkspaceBuffer workspace,
                         ffi::RemainingRets kept, ForwardAttributes attributes) {
  return execute_forward(stream, ordinal, /*communicator=*/nullptr, x, ids, weights, gate, up, down,
                         y, workspace, kept, attributes);
}

ffi::Error plan_alone(cudaStream_t stream, int32_t ordinal, Int32Buffer ids,
                      WorkspaceBuffer workspace, ffi::RemainingRets tables,
                      PlanAttributes attributes) {
  return execute_plan(stream, ordinal, /*communicator=*/nullptr, ids, workspace, tables,
                      attributes);
}

ffi::Error backward_alone(cudaStream_t stream, int32_t ordinal, Bf16Buffer x, Bf16Buffer dy,
                          ffi::Buffer<ffi::F32> weights, Bf16Buffer gate, Bf16Buffer up,
                          Bf16Buffer down, Bf16Buffer saved, Int32Buffer row_source,
                          Int32Buffer expert_tile, Int32Buffer slot_rank, Int32Buffer slot_row,
                          ffi::RemainingArgs replay, ffi::Result<Bf16Buffer> dx,
                          ffi::Result<ffi::Buffer<ffi::F32>> d_weights,
                          ffi::Result<ffi::AnyBuffer> d_gate, ffi::Result<ffi::AnyBuffer> d_up,
                          ffi::Result<ffi::AnyBuffer> d_down,
                          ffi::Result<ffi::Buffer<ffi::BF16>> spent, WorkspaceBuffer workspace,
                          BackwardAttributes attributes) {
  return execute_backward(stream, ordinal, /*communicator=*/nullptr, x, dy, weights, gate, up, down,
                          saved, row_source, expert_tile, slot_rank, slot_row, replay, dx,
                          d_weights, d_gate, d_up, d_down, spent, workspace, attributes);
}

// ids is every rank's, [ranks, tokens, top_k]; place is [group, rank], since one program is that of
// all ranks.
ffi::Error plan_of_gathered_routes(cudaStream_t stream, int32_t ordinal, Int32Buffer ids,
                                   Int32Buffer place, WorkspaceBuffer workspace,
                                   ffi::RemainingRets tables, GatheredPlanAttributes attributes) {
  return failure_if(launch_gathered_plan_call({.shape = attributes.shape(),
                                               .ids = ids.typed_data(),
                                               .rank = place.typed_data() + 1,
                                               .workspace = memory_of(workspace),
                                               .tables = plan_tables(tables)},
                                              ordinal, stream));
}

// slots is [tokens * top_k, width], slot_rank and weights are [tokens, top_k], out is
// [tokens, width] in the dtype of slots: f32 or bf16.
ffi::Error weighted_sum(cudaStream_t stream, ffi::AnyBuffer slots, Int32Buffer slot_rank,
                        ffi::Buffer<ffi::F32> weights, ffi::Result<ffi::AnyBuffer> out) {
  return failure_if(launch_weighted_sum_call({.is_float32 = slots.element_type() == ffi::F32,
                                              .slots = slots.untyped_data(),
                                              .slot_rank = slot_rank.typed_data(),
                                              .weights = weights.typed_data(),
                                              .tokens = weights.dimensions()[0],
                                              .top_k = weights.dimensions()[1],
                                              .width = out->dimensions()[1],
                                              .out = out->untyped_data()},
                                             stream));
}

MxValues<const void*> typed(ffi::AnyBuffer array) {
  return {array.element_type() == ffi::F32, array.untyped_data()};
}

MxValues<void*> typed(ffi::Result<ffi::AnyBuffer> array) {
  return {array->element_type() == ffi::F32, array->untyped_data()};
}

// The operands and results of these three are those of the CPU platform's.
ffi::Error quantize(cudaStream_t stream, ffi::AnyBuffer values,
                    ffi::Result<ffi::AnyBuffer> elements, ffi::Result<ffi::AnyBuffer> scales) {
  return failure_if(launch_quantize_call({.shape = mx_shape(values),
                                          .values = typed(values),
                                          .elements = bytes(*elements),
                                          .scales = bytes(*scales)},
                                         stream));
}

ffi::Error dequantize(cudaStream_t stream, ffi::AnyBuffer elements, ffi::AnyBuffer scales,
                      ffi::Result<ffi::AnyBuffer> values) {
  return failure_if(launch_dequantize_call({.shape = mx_shape(elements),
                                            .elements = bytes(elements),
                                            .scales = bytes(scales),
                                            .values = typed(values)},
                                           stream));
}

ffi::Error round(cudaStream_t stream, ffi::AnyBuffer values, ffi::Result<ffi::AnyBuffer> rounded,
                 ffi::RemainingRets others) {
  return failure_if(launch_round_call({.shape = mx_shape(values),
                                       .values = typed(values),
                                       .rounded = typed(rounded),
                                       .across = rounded_across(others)},
                                      stream));
}

}  // namespace
}  // namespace mok

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(mok::GatheredPlanAttributes,
                                      xla::ffi::StructMember<int32_t>("ranks"),
                                      xla::ffi::StructMember<int64_t>("tokens"),
                                      xla::ffi::StructMember<int32_t>("top_k"),
                                      xla::ffi::StructMember<int32_t>("experts"),
                                      xla::ffi::StructMember<int32_t>("tile_rows"),
                                      xla::ffi::StructMember<int64_t>("chunk_rows"));

namespace mok {
namespace {

auto bind_launches() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>();
}

XLA_FFI_DEFINE_HANDLER(
    initialize_handler, initialize,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER(forward_alone_handler, forward_alone, bind_forward(bind_launches()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(backward_alone_handler, backward_alone, bind_backward(bind_launches()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(plan_alone_handler, plan_alone, bind_plan(bind_launches()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(plan_of_gathered_routes_handler, plan_of_gathered_routes,
                       bind_launches()
                           .Arg<Int32Buffer>()
                           .Arg<Int32Buffer>()
                           .Ret<ffi::Buffer<ffi::U8>>()
                           .RemainingRets()
                           .Attrs<GatheredPlanAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(weighted_sum_handler, weighted_sum,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<Int32Buffer>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

auto bind_stream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

XLA_FFI_DEFINE_HANDLER(
    quantize_handler, quantize,
    bind_stream().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(
    dequantize_handler, dequantize,
    bind_stream().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(round_handler, round,
                       bind_stream().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace mok

extern "C" {

XLA_FFI_Error* MokDeviceInitialize(XLA_FFI_CallFrame* frame) {
  return mok::initialize_handler(frame);
}
XLA_FFI_Error* MokForwardAlone(XLA_FFI_CallFrame* frame) {
  return mok::forward_alone_handler(frame);
}
XLA_FFI_Error* MokBackwardAlone(XLA_FFI_CallFrame* frame) {
  return mok::backward_alone_handler(frame);
}
XLA_FFI_Error* MokPlanAlone(XLA_FFI_CallFrame* frame) { return mok::plan_alone_handler(frame); }
XLA_FFI_Error* MokPlanOfGatheredRoutesOnGpu(XLA_FFI_CallFrame* frame) {
  return mok::plan_of_gathered_routes_handler(frame);
}
XLA_FFI_Error* MokWeightedSumOnGpu(XLA_FFI_CallFrame* frame) {
  return mok::weighted_sum_handler(frame);
}
XLA_FFI_Error* MokQuantizeOnGpu(XLA_FFI_CallFrame* frame) { return mok::quantize_handler(frame); }
XLA_FFI_Error* MokDequantizeOnGpu(XLA_FFI_CallFrame* frame) {
  return mok::dequantize_handler(frame);
}
XLA_FFI_Error* MokRoundOnGpu(XLA_FFI_CallFrame* frame) { return mok::round_handler(frame); }

}  // extern "C"
