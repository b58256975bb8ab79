#include "rack/transfers.h"

namespace mok::rack {

Transfers::Transfers(int32_t ranks, const Machine& machine, double bin_s, Events* events)
    : machine_(machine),
      ranks_(ranks),
      bin_s_(bin_s),
      events_(*events),
      links_(ranks, machine.link_bytes_per_s) {
  dispatch.bytes.resize(ranks * ranks);
  combine.bytes.resize(ranks * ranks);
}

void Transfers::begin_phase(double after) {
  origin_ += after;
  links_ = Links(ranks_, machine_.link_bytes_per_s);
}

void Transfers::send(const Transfer& transfer) {
  int32_t index = static_cast<int32_t>(transfers_.size());
  if (free_.empty()) {
    transfers_.push_back(transfer);
  } else {
    index = free_.back();
    free_.pop_back();
    transfers_[index] = transfer;
  }
  const double first = links_.leave(transfer.from, transfer.bytes, events_.now());
  events_.add(first, What::kArrive, transfer.from, index);
}

void Transfers::ask(const Transfer& transfer) {
  const double request = transfer.bytes * machine_.request_share;
  links_.leave(transfer.to, request, events_.now());
  links_.enter(transfer.from, request, events_.now());
  send(transfer);
}

Transfers::Arrival Transfers::arrive(int32_t index) {
  const Transfer transfer = transfers_[index];
  free_.push_back(index);
  const double done = links_.enter(transfer.to, transfer.bytes, events_.now());
  const bool is_token =
      transfer.purpose == Purpose::kPulledToken || transfer.purpose == Purpose::kPushedToken;
  Traffic& traffic = is_token ? dispatch : combine;
  traffic.add(ranks_, transfer.from, transfer.to, transfer.bytes,
              static_cast<size_t>((origin_ + done) / bin_s_));
  return {transfer, done};
}

}  // namespace mok::rack
