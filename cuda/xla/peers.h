#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "link/arena.h"
#include "xla/ffi/api/collectives_api.h"
#include "xla/ffi/api/ffi.h"

// How a custom call finds its ranks: XLA's communicator of them, and the arena upon it.
namespace mok {

using Communicators = xla::ffi::internal::CommunicatorContextBase<xla::ffi::internal::ErrorPolicy>;

// For `Ctx<xla::ffi::Extension<Collectives>>()`.
struct Collectives : xla::ffi::internal::CollectivesExtensionBase<Communicators> {
  // Later minor versions only add to it.
  static bool Support(int32_t major, int32_t minor) { return major == 0 && minor >= 1; }
};

// The groups of ranks one after the other, `ranks` each, as positions in the mesh.
struct RankGroups {
  int32_t ranks;
  xla::ffi::Span<const int64_t> positions;
};

// In the Prepare stage: asks XLA for the communicator.
xla::ffi::Error request_communicator(Communicators communicators, const RankGroups& groups);

// In the Initialize stage: prepares the device and makes the arena, see `ensure_arena`.
xla::ffi::Error make_arena(Communicators communicators, const RankGroups& groups, int32_t ordinal,
                           const ArenaLayout& layout, uint64_t timeout_ns, cudaStream_t stream);

// In the Execute stage: the arena that `make_arena` has made.
xla::ffi::ErrorOr<const Arena*> arena_of(Communicators communicators, const RankGroups& groups,
                                         const ArenaLayout& layout);

}  // namespace mok
