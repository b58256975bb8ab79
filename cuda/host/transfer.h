#pragma once

#include <cstddef>
#include <span>

#include "core/plan.h"
#include "core/ring.h"

// The moves of rows between ranks, over host memory. Dispatch (and reverse combine) brings the
// home ranks' rows into the experts' rings; combine (and reverse dispatch) brings ring rows back
// into the home slots. A pull is done by the rank that receives, a push by the rank that sends.
namespace mok {

struct TransferShape {
  int32_t ranks;
  int64_t choices;        // slots per rank: tokens * top_k
  int64_t choices_a_row;  // dispatch: choices that share one row of values, top_k or 1
  int32_t tile_rows;
  Ring ring;
  std::size_t row_bytes;
};

// One rank's side of a move in one wave.
struct DispatchSeat {
  const std::byte* values;  // [choices / choices_a_row] rows
  std::byte* ring;          // [ring_rows] rows
  PlanView plan;
  int64_t wave;
};

struct CombineSeat {
  const std::byte* ring;  // [ring_rows] rows
  std::byte* slots;       // [choices] rows
  PlanView plan;
  int64_t wave;
};

using DispatchSeats = std::span<const DispatchSeat* const>;
using CombineSeats = std::span<const CombineSeat* const>;

void dispatch_pull(const TransferShape& shape, DispatchSeats seats, int32_t rank);
void dispatch_push(const TransferShape& shape, DispatchSeats seats, int32_t rank);
void combine_pull(const TransferShape& shape, CombineSeats seats, int32_t rank);
void combine_push(const TransferShape& shape, CombineSeats seats, int32_t rank);

}  // namespace mok
