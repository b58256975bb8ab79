#include "rack/puller.h"

#include <algorithm>

namespace mok::rack {

Puller::Puller(const RankWork& work, const Machine& machine, const Moves& moves, int32_t rank,
               int32_t ranks, Events* events, Transfers* transfers)
    : work_(work),
      machine_(machine),
      moves_(moves),
      rank_(rank),
      events_(*events),
      transfers_(*transfers),
      warps_(machine.sms),
      pulled_(work.tiles()) {
  if (moves.dispatch_push) {
    tiles_there_ = work.tiles();
    return;
  }
  pulls_ = pulls_of(work, moves.pull_order, rank, ranks, machine.sms);
  count_tiles();
  for (int32_t warp = 0; warp < machine.sms; ++warp) {
    look(warp);
  }
}

void Puller::look(int32_t warp) {
  const size_t position = warps_[warp].position;
  if (position < pulls_[warp].size()) {
    const double seconds = pulls_[warp][position].looks * machine_.look_s;
    events_.add(events_.now() + seconds, What::kPull, rank_, warp);
  }
}

void Puller::ask(int32_t w) {
  Warp& warp = warps_[w];
  const Pull& pull = pulls_[w][warp.position];
  const double now = events_.now();
  const double seconds = pull.count * moves_.token_bytes / machine_.pull_bytes_per_s;
  warp.end = now + std::max(seconds, machine_.pull_latency_s);
  warp.coming = pull.count;
  for (int32_t i = 0; i < pull.count; ++i) {
    transfers_.ask({Purpose::kPulledToken, pull.tokens[i].home, rank_, w, moves_.token_bytes, now});
  }
}

void Puller::arrive(int32_t w, double done) {
  Warp& warp = warps_[w];
  warp.end = std::max(warp.end, done);
  if (--warp.coming == 0) {
    events_.add(warp.end, What::kPulled, rank_, w);
  }
}

bool Puller::take(int32_t warp) {
  const Pull& pull = pulls_[warp][warps_[warp].position++];
  for (int32_t i = 0; i < pull.count; ++i) {
    ++pulled_[pull.tokens[i].tile];
  }
  end_ = events_.now();
  look(warp);
  return count_tiles();
}

bool Puller::count_tiles() {
  const int32_t before = tiles_there_;
  while (tiles_there_ < work_.tiles() &&
         pulled_[tiles_there_] == work_.tokens_of_tile[tiles_there_]) {
    ++tiles_there_;
  }
  return tiles_there_ > before;
}

}  // namespace mok::rack
