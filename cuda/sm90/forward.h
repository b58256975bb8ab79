#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "sm90/work.h"

// dispatch, gate/up, SwiGLU, down and push to the home slots, in one persistent kernel.
namespace mok::sm90 {

using Bits16 = uint16_t;  // a bf16, where nobody computes with it

struct ForwardParams {
  // Boxes of 64 x 64: panels of the weights [experts * rows, columns], tiles of the hidden ring.
  CUtensorMap gate;
  CUtensorMap up;
  CUtensorMap down;
  CUtensorMap hidden_tiles;
  CUtensorMap hidden_warps;  // the same ring in boxes of 16 rows, for stores

  const Bits16* const* x;  // [ranks] tokens of each rank, [tokens, hidden]
  Bits16* const* slots;    // [ranks] home slots of each rank, [tokens * top_k, hidden]
  const int32_t* row_source;
  const WorkItem* items;
  const int32_t* item_count;
  const int32_t* tile_count;
  uint32_t* hidden_ready;  // [tiles] stores of the tile's hidden rows
  uint32_t* down_done;     // [tiles] column blocks whose reads of the hidden rows have ended
  int32_t* fault;          // set to 1 when a wait has expired

  int32_t hidden;
  int32_t inner;
  int32_t top_k;
  int32_t choices;  // per rank
  int32_t ring_tiles;
  int32_t gate_up_columns;
  int32_t down_columns;
  float clamp;  // infinity for none
  uint64_t timeout_ns;
};

// Loads the kernel and finds how many clusters fit the device at once. Not for a captured stream.
cudaError_t prepare_forward(int* clusters);

cudaError_t launch_forward(const ForwardParams& params, int clusters, cudaStream_t stream);

}  // namespace mok::sm90
