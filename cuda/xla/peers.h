#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "call/peers.h"
#include "xla/errors.h"
#include "xla/ffi/api/collectives_api.h"
#include "xla/ffi/api/ffi.h"
#include "xla/rank_groups.h"

// How a custom call finds its ranks: XLA's communicator of them.
namespace mok {

using Communicators = xla::ffi::internal::CommunicatorContextBase<xla::ffi::internal::ErrorPolicy>;

// For `Ctx<xla::ffi::Extension<Collectives>>()`.
struct Collectives : xla::ffi::internal::CollectivesExtensionBase<Communicators> {
  // Later minor versions only add to it.
  static bool Support(int32_t major, int32_t minor) { return major == 0 && minor >= 1; }
};

// In the Prepare stage: asks XLA for the communicator.
xla::ffi::Error request_communicator(Communicators communicators, const RankGroups& groups);

// In the later stages: the `ncclComm_t` that was asked for.
xla::ffi::ErrorOr<void*> communicator_of(Communicators communicators, const RankGroups& groups);

// The Prepare stage of a call with peers, whatever it does.
template <typename Attributes>
xla::ffi::Error prepare(Communicators communicators, Attributes attributes) {
  return request_communicator(communicators, attributes.rank_groups());
}

// Its Initialize stage.
template <typename Attributes>
xla::ffi::Error initialize(cudaStream_t stream, int32_t ordinal, Communicators communicators,
                           Attributes attributes) {
  const auto communicator = communicator_of(communicators, attributes.rank_groups());
  if (communicator.has_error()) {
    return communicator.error();
  }
  return failure_if(prepare_peers(*communicator, ordinal, attributes.arena_layout(),
                                  attributes.timeout_ns(), stream));
}

}  // namespace mok
