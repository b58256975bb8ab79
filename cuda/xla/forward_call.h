#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

#include "call/forward.h"
#include "xla/errors.h"
#include "xla/ffi/api/ffi.h"
#include "xla/memory.h"
#include "xla/plan_tables.h"
#include "xla/rank_groups.h"

// What XLA hands over for a forward call, with peers or without.
namespace mok {

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
  bool reverse_combine_push;
  bool reverse_dispatch_push;
  bool composed;
  bool keeps_plan;
  bool mxfp8;
  float clamp;
  double timeout_s;
  xla::ffi::Span<const int64_t> groups;

  RankGroups rank_groups() const { return {ranks, groups}; }
  uint64_t timeout_ns() const { return static_cast<uint64_t>(timeout_s * 1e9); }
  sm90::ForwardShape shape() const {
    return sm90::make_forward_shape(
        {ranks, tokens, top_k, experts, tile_rows, chunk_rows},
        {dispatch_push, combine_push, reverse_combine_push, reverse_dispatch_push}, composed,
        keeps_plan, ring_rows, hidden, inner, mxfp8);
  }
  ArenaLayout arena_layout() const { return shape().arena_layout(); }
};

using Bf16Buffer = xla::ffi::Buffer<xla::ffi::BF16>;

inline uint16_t* bits(Bf16Buffer buffer) {
  return reinterpret_cast<uint16_t*>(buffer.typed_data());
}

// `kept` is empty, or if the plan is kept pre-activations of some tiles and a spare one, which only
// the CPU's layer writes, and the plan's tables. `communicator` is null without peers.
inline xla::ffi::Error execute_forward(cudaStream_t stream, int32_t ordinal, void* communicator,
                                       Bf16Buffer x, xla::ffi::Buffer<xla::ffi::S32> ids,
                                       xla::ffi::Buffer<xla::ffi::F32> weights, Bf16Buffer gate,
                                       Bf16Buffer up, Bf16Buffer down,
                                       xla::ffi::Result<Bf16Buffer> y, WorkspaceBuffer workspace,
                                       xla::ffi::RemainingRets kept,
                                       const ForwardAttributes& attributes) {
  ForwardCall call{.shape = attributes.shape(),
                   .clamp = attributes.clamp,
                   .timeout_ns = attributes.timeout_ns(),
                   .communicator = communicator,
                   .x = bits(x),
                   .ids = ids.typed_data(),
                   .weights = weights.typed_data(),
                   .gate = bits(gate),
                   .up = bits(up),
                   .down = bits(down),
                   .y = bits(*y),
                   .workspace = memory_of(workspace),
                   .saved = nullptr,
                   .saved_tiles = 0,
                   .tables = {}};
  if (attributes.keeps_plan) {
    auto saved = *kept.get<Bf16Buffer>(0);
    call.saved = bits(*saved);
    call.saved_tiles = static_cast<int32_t>(saved->dimensions().front()) - 1;
    call.tables = plan_tables(kept, 1);
  }
  return failure_if(launch_forward_call(call, ordinal, stream));
}

// The operands, results and attributes of `execute_forward`, after its contexts.
template <typename Binding>
auto bind_forward(Binding binding) {
  namespace ffi = xla::ffi;
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

}  // namespace mok

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    mok::ForwardAttributes, xla::ffi::StructMember<int32_t>("ranks"),
    xla::ffi::StructMember<int64_t>("tokens"), xla::ffi::StructMember<int32_t>("top_k"),
    xla::ffi::StructMember<int32_t>("experts"), xla::ffi::StructMember<int64_t>("hidden"),
    xla::ffi::StructMember<int64_t>("inner"), xla::ffi::StructMember<int32_t>("tile_rows"),
    xla::ffi::StructMember<int64_t>("chunk_rows"), xla::ffi::StructMember<int64_t>("ring_rows"),
    xla::ffi::StructMember<bool>("dispatch_push"), xla::ffi::StructMember<bool>("combine_push"),
    xla::ffi::StructMember<bool>("reverse_combine_push"),
    xla::ffi::StructMember<bool>("reverse_dispatch_push"), xla::ffi::StructMember<bool>("composed"),
    xla::ffi::StructMember<bool>("keeps_plan"), xla::ffi::StructMember<bool>("mxfp8"),
    xla::ffi::StructMember<float>("clamp"), xla::ffi::StructMember<double>("timeout_s"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"));
