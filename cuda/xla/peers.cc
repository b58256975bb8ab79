#include "xla/peers.h"

#include <string>
#include <vector>

#include "xla/gpu_device.h"
#include "xla/launches.h"

namespace mok {
namespace {

namespace ffi = xla::ffi;

std::vector<std::vector<int64_t>> replica_groups(const RankGroups& groups) {
  std::vector<std::vector<int64_t>> all;
  const auto& positions = groups.positions;
  for (auto begin = positions.begin(); begin != positions.end(); begin += groups.ranks) {
    all.emplace_back(begin, begin + groups.ranks);
  }
  return all;
}

ffi::ErrorOr<void*> communicator(Communicators communicators, const RankGroups& groups) {
  const auto handle =
      communicators.GetCommunicator(ffi::GroupMode::kFlattenedId, replica_groups(groups), 0);
  if (handle.has_error()) {
    return ffi::Unexpected(handle.error());
  }
  return static_cast<void*>(*handle);
}

}  // namespace

ffi::Error request_communicator(Communicators communicators, const RankGroups& groups) {
  return communicators.RequestCommunicator(ffi::GroupMode::kFlattenedId, replica_groups(groups), 0);
}

ffi::Error make_arena(Communicators communicators, const RankGroups& groups, int32_t ordinal,
                      const ArenaLayout& layout, uint64_t timeout_ns, cudaStream_t stream) {
  const auto comm = communicator(communicators, groups);
  if (comm.has_error()) {
    return comm.error();
  }
  return failure_if(
      ensure_arena(*comm, ordinal, layout, timeout_ns, stream, prepare_device(ordinal)));
}

ffi::ErrorOr<const Arena*> arena_of(Communicators communicators, const RankGroups& groups,
                                    const ArenaLayout& layout) {
  const auto comm = communicator(communicators, groups);
  if (comm.has_error()) {
    return ffi::Unexpected(comm.error());
  }
  const Arena* const arena = find_arena(*comm, layout);
  if (arena == nullptr) {
    return ffi::Unexpected(failure("the arena was not initialised"));
  }
  return arena;
}

}  // namespace mok
