#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

#include "call/plan.h"
#include "xla/errors.h"
#include "xla/ffi/api/ffi.h"
#include "xla/memory.h"
#include "xla/plan_tables.h"
#include "xla/rank_groups.h"

// What XLA hands over for a call that makes a plan, with peers or without.
namespace mok {

// Everything static: stages before Execute see no operands.
struct PlanAttributes {
  int32_t ranks;
  int64_t tokens;
  int32_t top_k;
  int32_t experts;
  int32_t tile_rows;
  int64_t chunk_rows;
  double timeout_s;
  xla::ffi::Span<const int64_t> groups;

  PlanShape shape() const { return {ranks, tokens, top_k, experts, tile_rows, chunk_rows}; }
  RankGroups rank_groups() const { return {ranks, groups}; }
  uint64_t timeout_ns() const { return static_cast<uint64_t>(timeout_s * 1e9); }
  ArenaLayout arena_layout() const { return plan_arena_layout(shape()); }
};

// `communicator` is null without peers.
inline xla::ffi::Error execute_plan(cudaStream_t stream, int32_t ordinal, void* communicator,
                                    xla::ffi::Buffer<xla::ffi::S32> ids, WorkspaceBuffer workspace,
                                    xla::ffi::RemainingRets tables,
                                    const PlanAttributes& attributes) {
  return failure_if(launch_plan_call({.shape = attributes.shape(),
                                      .timeout_ns = attributes.timeout_ns(),
                                      .communicator = communicator,
                                      .ids = ids.typed_data(),
                                      .workspace = memory_of(workspace),
                                      .tables = plan_tables(tables)},
                                     ordinal, stream));
}

// The operand, results and attributes of `execute_plan`, after its contexts.
template <typename Binding>
auto bind_plan(Binding binding) {
  namespace ffi = xla::ffi;
  return std::move(binding)
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Ret<ffi::Buffer<ffi::U8>>()
      .RemainingRets()
      .template Attrs<PlanAttributes>();
}

}  // namespace mok

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    mok::PlanAttributes, xla::ffi::StructMember<int32_t>("ranks"),
    xla::ffi::StructMember<int64_t>("tokens"), xla::ffi::StructMember<int32_t>("top_k"),
    xla::ffi::StructMember<int32_t>("experts"), xla::ffi::StructMember<int32_t>("tile_rows"),
    xla::ffi::StructMember<int64_t>("chunk_rows"), xla::ffi::StructMember<double>("timeout_s"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"));
