#pragma once

#include <cstdint>

#include "core/mx.h"
#include "device/warp.cuh"
#include "sm90/forward.h"

// Where rows lie.
namespace mok::sm90 {

__device__ inline Bits16* place_in(const RowRing& ring, int32_t row, int32_t width) {
  return ring.rows + int64_t{row % ring.count} * width;
}

// The token of a choice, given by its global number: this rank's own, one that has been received,
// or else where its rank shows it, at an offset in its arena.
template <typename Params>
__device__ const Bits16* token_of(const Params& params, const Bits16* own, const Bits16* received,
                                  int64_t offset, int32_t slot) {
  const int32_t token = slot / params.top_k;
  const int32_t rank = token / params.tokens;
  const int64_t in_rank = token - rank * params.tokens;
  if (rank == params.rank) {
    return own + in_rank * params.hidden;
  }
  if (received != nullptr) {
    return received + int64_t{token} * params.hidden;
  }
  const char* const shown = params.bases[rank] + offset;
  return reinterpret_cast<const Bits16*>(shown) + in_rank * params.hidden;
}

// Rows of MXFP8 in arenas: at an offset in that of the rank that has them, or pushed to this
// rank's.
struct EncodedRows {
  int64_t offset;
  bool are_pushed;
};

// That of a token, given by its global number.
template <typename Params>
__device__ const char* encoded_row(const Params& params, const EncodedRows& rows, int32_t token) {
  const int32_t rank = token / params.tokens;
  const char* const base = params.bases[rows.are_pushed ? params.rank : rank];
  const int64_t row = rows.are_pushed ? token : token - rank * params.tokens;
  return base + rows.offset + row * mx_row_bytes(params.hidden);
}

// The home slot of a choice, given by its global number.
template <typename Params>
__device__ Bits16* home_of(const Params& params, int32_t slot) {
  const int32_t rank = slot / params.choices;
  const int64_t choice = slot - rank * params.choices;
  Bits16* const slots = params.bases == nullptr
                            ? params.own_slots
                            : reinterpret_cast<Bits16*>(params.bases[rank] + params.slots_offset);
  return slots + choice * params.hidden;
}

}  // namespace mok::sm90
