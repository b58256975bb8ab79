#include "call/peers.h"

#include "call/device.h"

namespace mok {

std::string prepare_peers(void* communicator, int32_t ordinal, const ArenaLayout& layout,
                          uint64_t timeout_ns, cudaStream_t stream) {
  return ensure_arena(communicator, ordinal, layout, timeout_ns, stream, prepare_device(ordinal));
}

std::string find_peers(void* communicator, const ArenaLayout& layout, const Arena** arena) {
  *arena = layout.ranks == 1 ? nullptr : find_arena(communicator, layout);
  return layout.ranks > 1 && *arena == nullptr ? "the arena was not initialised" : "";
}

}  // namespace mok
