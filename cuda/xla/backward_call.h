#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

#include "call/backward.h"
#include "xla/errors.h"
#include "xla/ffi/api/ffi.h"
#include "xla/memory.h"
#include "xla/rank_groups.h"

// What XLA hands over for a backward call, with peers or without.
namespace mok {

// Everything static: stages before Execute see no operands.
struct BackwardAttributes {
  int32_t ranks;
  int64_t tokens;
  int32_t top_k;
  int32_t experts;
  int64_t hidden;
  int64_t inner;
  int32_t tile_rows;
  int64_t chunk_rows;
  int64_t ring_rows;
  int64_t saved_rows;
  bool dispatch_push;
  bool combine_push;
  bool reverse_combine_push;
  bool reverse_dispatch_push;
  bool composed;
  bool mxfp8;
  float clamp;
  double timeout_s;
  xla::ffi::Span<const int64_t> groups;

  RankGroups rank_groups() const { return {ranks, groups}; }
  uint64_t timeout_ns() const { return static_cast<uint64_t>(timeout_s * 1e9); }
  BackwardSizes sizes() const {
    return {{ranks, tokens, top_k, experts, tile_rows, chunk_rows},
            {dispatch_push, combine_push, reverse_combine_push, reverse_dispatch_push},
            composed,
            ring_rows,
            saved_rows,
            hidden,
            inner,
            mxfp8};
  }
  ArenaLayout arena_layout() const { return sizes().arena_layout(); }
};

// `saved` are pre-activations of some tiles and a spare one, which only the CPU's layer writes; the
// result `spent` is the same memory. `replay` has no operands, or gate and up of the forward pass.
// `communicator` is null without peers.
inline xla::ffi::Error execute_backward(
    cudaStream_t stream, int32_t ordinal, void* communicator, xla::ffi::Buffer<xla::ffi::BF16> x,
    xla::ffi::Buffer<xla::ffi::BF16> dy, xla::ffi::Buffer<xla::ffi::F32> weights,
    xla::ffi::Buffer<xla::ffi::BF16> gate, xla::ffi::Buffer<xla::ffi::BF16> up,
    xla::ffi::Buffer<xla::ffi::BF16> down, xla::ffi::Buffer<xla::ffi::BF16> saved,
    xla::ffi::Buffer<xla::ffi::S32> row_source, xla::ffi::Buffer<xla::ffi::S32> expert_tile,
    xla::ffi::Buffer<xla::ffi::S32> slot_rank, xla::ffi::Buffer<xla::ffi::S32> slot_row,
    xla::ffi::RemainingArgs replay, xla::ffi::Result<xla::ffi::Buffer<xla::ffi::BF16>> dx,
    xla::ffi::Result<xla::ffi::Buffer<xla::ffi::F32>> d_weights,
    xla::ffi::Result<xla::ffi::AnyBuffer> d_gate, xla::ffi::Result<xla::ffi::AnyBuffer> d_up,
    xla::ffi::Result<xla::ffi::AnyBuffer> d_down,
    xla::ffi::Result<xla::ffi::Buffer<xla::ffi::BF16>> spent, WorkspaceBuffer workspace,
    const BackwardAttributes& attributes) {
  const auto bits = [](auto buffer) { return reinterpret_cast<uint16_t*>(buffer.typed_data()); };
  if (spent->typed_data() != saved.typed_data()) {
    return xla::ffi::Error::Internal("jax_mok: the saved pre-activations have been copied");
  }
  // Without them those of dx are replayed with.
  const uint16_t* replay_gate = nullptr;
  const uint16_t* replay_up = nullptr;
  if (replay.size() != 0 && replay.size() != 2) {
    return xla::ffi::Error::Internal("jax_mok: replays take two weights, or those of dx");
  }
  if (replay.size() == 2) {
    replay_gate = bits(*replay.get<xla::ffi::Buffer<xla::ffi::BF16>>(0));
    replay_up = bits(*replay.get<xla::ffi::Buffer<xla::ffi::BF16>>(1));
  }
  return failure_if(launch_backward_call({.sizes = attributes.sizes(),
                                          .clamp = attributes.clamp,
                                          .timeout_ns = attributes.timeout_ns(),
                                          .communicator = communicator,
                                          .x = bits(x),
                                          .dy = bits(dy),
                                          .weights = weights.typed_data(),
                                          .gate = bits(gate),
                                          .up = bits(up),
                                          .down = bits(down),
                                          .replay_gate = replay_gate,
                                          .replay_up = replay_up,
                                          .row_source = row_source.typed_data(),
                                          .expert_tile = expert_tile.typed_data(),
                                          .slot_rank = slot_rank.typed_data(),
                                          .slot_row = slot_row.typed_data(),
                                          .dx = bits(*dx),
                                          .d_weights = d_weights->typed_data(),
                                          .saved = bits(*spent),
                                          .d_gate = d_gate->untyped_data(),
                                          .d_up = d_up->untyped_data(),
                                          .d_down = d_down->untyped_data(),
                                          .dw_is_f32 = d_gate->element_type() == xla::ffi::F32,
                                          .workspace = memory_of(workspace)},
                                         ordinal, stream));
}

// The operands, results and attributes of `execute_backward`, after its contexts.
template <typename Binding>
auto bind_backward(Binding binding) {
  namespace ffi = xla::ffi;
  return std::move(binding)
      .template Arg<ffi::Buffer<ffi::BF16>>()
      .template Arg<ffi::Buffer<ffi::BF16>>()
      .template Arg<ffi::Buffer<ffi::F32>>()
      .template Arg<ffi::Buffer<ffi::BF16>>()
      .template Arg<ffi::Buffer<ffi::BF16>>()
      .template Arg<ffi::Buffer<ffi::BF16>>()
      .template Arg<ffi::Buffer<ffi::BF16>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .RemainingArgs()
      .template Ret<ffi::Buffer<ffi::BF16>>()
      .template Ret<ffi::Buffer<ffi::F32>>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::Buffer<ffi::BF16>>()
      .template Ret<ffi::Buffer<ffi::U8>>()
      .template Attrs<BackwardAttributes>();
}

}  // namespace mok

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    mok::BackwardAttributes, xla::ffi::StructMember<int32_t>("ranks"),
    xla::ffi::StructMember<int64_t>("tokens"), xla::ffi::StructMember<int32_t>("top_k"),
    xla::ffi::StructMember<int32_t>("experts"), xla::ffi::StructMember<int64_t>("hidden"),
    xla::ffi::StructMember<int64_t>("inner"), xla::ffi::StructMember<int32_t>("tile_rows"),
    xla::ffi::StructMember<int64_t>("chunk_rows"), xla::ffi::StructMember<int64_t>("ring_rows"),
    xla::ffi::StructMember<int64_t>("saved_rows"), xla::ffi::StructMember<bool>("dispatch_push"),
    xla::ffi::StructMember<bool>("combine_push"),
    xla::ffi::StructMember<bool>("reverse_combine_push"),
    xla::ffi::StructMember<bool>("reverse_dispatch_push"), xla::ffi::StructMember<bool>("composed"),
    xla::ffi::StructMember<bool>("mxfp8"), xla::ffi::StructMember<float>("clamp"),
    xla::ffi::StructMember<double>("timeout_s"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"));
