#include "xla/peers.h"

#include <vector>

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

}  // namespace

ffi::Error request_communicator(Communicators communicators, const RankGroups& groups) {
  return communicators.RequestCommunicator(ffi::GroupMode::kFlattenedId, replica_groups(groups), 0);
}

ffi::ErrorOr<void*> communicator_of(Communicators communicators, const RankGroups& groups) {
  const auto handle =
      communicators.GetCommunicator(ffi::GroupMode::kFlattenedId, replica_groups(groups), 0);
  if (handle.has_error()) {
    return ffi::Unexpected(handle.error());
  }
  return static_cast<void*>(*handle);
}

}  // namespace mok
