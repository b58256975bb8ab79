#include "host/transfer.h"

#include <algorithm>
#include <cstring>

namespace mok {
namespace {

struct Rows {
  int64_t begin;
  int64_t end;
  bool contain(int64_t row) const { return begin <= row && row < end; }
};

// The canonical rows that a rank's ring holds in this wave.
template <typename Seat>
Rows rows_of_wave(const TransferShape& shape, const Seat& seat) {
  const int64_t rows = static_cast<int64_t>(seat.plan.counts[kTiles]) * shape.tile_rows;
  const int64_t begin = std::min(seat.wave * shape.ring.ring_rows, rows);
  return {begin, std::min(begin + shape.ring.ring_rows, rows)};
}

void zero_padding(const TransferShape& shape, const DispatchSeat& seat) {
  const Rows rows = rows_of_wave(shape, seat);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    if (seat.plan.row_source[row] == kPadding) {
      std::memset(seat.ring + shape.ring.ring_row(row) * shape.row_bytes, 0, shape.row_bytes);
    }
  }
}

}  // namespace

void dispatch_pull(const TransferShape& shape, DispatchSeats seats, int32_t rank) {
  const DispatchSeat& seat = *seats[rank];
  zero_padding(shape, seat);
  const Rows rows = rows_of_wave(shape, seat);
  for (int64_t chunk = rows.begin; chunk < rows.end; chunk += shape.ring.chunk_rows) {
    const int64_t chunk_end = std::min(chunk + shape.ring.chunk_rows, rows.end);
    for (int64_t pull = chunk; pull < chunk_end; ++pull) {
      const int32_t row = seat.plan.pull_order[pull];
      if (row == kPadding) {
        break;
      }
      const int64_t source = seat.plan.row_source[row];
      const int64_t value = source % shape.choices / shape.choices_a_row;
      std::memcpy(seat.ring + shape.ring.ring_row(row) * shape.row_bytes,
                  seats[source / shape.choices]->values + value * shape.row_bytes, shape.row_bytes);
    }
  }
}

void dispatch_push(const TransferShape& shape, DispatchSeats seats, int32_t rank) {
  const DispatchSeat& seat = *seats[rank];
  zero_padding(shape, seat);
  for (int64_t choice = 0; choice < shape.choices; ++choice) {
    if (seat.plan.slot_rank[choice] == kMaskedChoice) {
      continue;
    }
    const DispatchSeat& destination = *seats[seat.plan.slot_rank[choice]];
    const int64_t row = seat.plan.slot_row[choice];
    if (rows_of_wave(shape, destination).contain(row)) {
      std::memcpy(destination.ring + shape.ring.ring_row(row) * shape.row_bytes,
                  seat.values + choice / shape.choices_a_row * shape.row_bytes, shape.row_bytes);
    }
  }
}

void combine_pull(const TransferShape& shape, CombineSeats seats, int32_t rank) {
  const CombineSeat& seat = *seats[rank];
  for (int64_t choice = 0; choice < shape.choices; ++choice) {
    if (seat.plan.slot_rank[choice] == kMaskedChoice) {
      continue;
    }
    const CombineSeat& source = *seats[seat.plan.slot_rank[choice]];
    const int64_t row = seat.plan.slot_row[choice];
    if (rows_of_wave(shape, source).contain(row)) {
      std::memcpy(seat.slots + choice * shape.row_bytes,
                  source.ring + shape.ring.ring_row(row) * shape.row_bytes, shape.row_bytes);
    }
  }
}

void combine_push(const TransferShape& shape, CombineSeats seats, int32_t rank) {
  const CombineSeat& seat = *seats[rank];
  const Rows rows = rows_of_wave(shape, seat);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t slot = seat.plan.row_source[row];
    if (slot == kPadding) {
      continue;
    }
    const CombineSeat& home = *seats[slot / shape.choices];
    std::memcpy(home.slots + slot % shape.choices * shape.row_bytes,
                seat.ring + shape.ring.ring_row(row) * shape.row_bytes, shape.row_bytes);
  }
}

}  // namespace mok
