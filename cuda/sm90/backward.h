#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/timeline.h"
#include "sm90/backward_work.h"
#include "sm90/forward.h"

// Gradients of the layer in one persistent kernel: reverse combine, SwiGLU backward, reverse
// dispatch and the weights' gradients, wave by wave of the plan's rows. Or a range of the work
// list, for callers that do the moves apart. A wave is, in this order,
//   replay  the pre-activations again, if some of its rows have not been saved
//   hidden  d_hidden = dy · W_downᵀ; from it the gradients of gate and up, the router weights' and
//           the weighted hidden rows, which go to rings
//   input   dx = d_gate · W_gateᵀ + d_up · W_upᵀ, pushed to the home slots or left to be pulled
//   weights dW_gate = xᵀ · d_gate, dW_up = xᵀ · d_up, dW_down = (w · hidden)ᵀ · dy
namespace mok::sm90 {

struct BackwardParams {
  // Boxes of 64 x 64: panels of the weights [experts * rows, columns]. Those that pre-activations
  // are replayed with are the forward pass's, which in MXFP8 differ from those of dx.
  CUtensorMap gate;
  CUtensorMap up;
  CUtensorMap down;
  // The rings, in blocks of 64 rows x 64 columns one after the other: of d_gate and d_up in turns,
  // and of the weighted hidden rows. Loaded block by block, stored in boxes of 16 rows.
  CUtensorMap gradient_blocks;
  CUtensorMap gradient_warps;
  CUtensorMap hidden_blocks;
  CUtensorMap hidden_warps;

  // The weights' gradients, in boxes of 128 bytes a row: 64 rows, of d_down in f32 32.
  CUtensorMap d_gate;
  CUtensorMap d_up;
  CUtensorMap d_down;
  CUtensorMap input_gate;
  CUtensorMap input_up;

  Bits16* received_x;    // [ranks, tokens, hidden] the peers' tokens
  Bits16* received_dy;   // likewise
  const float* weights;  // [ranks, tokens, top_k] router weights of all ranks
  // Pre-activations as ForwardParams::saved. The gradient ring may begin where they do, and the
  // lower halves lie at their end, where nothing is then read: see BackwardSizes.
  const Bits16* saved;
  Bits16*
      gradient_ring;  // [ring tiles][inner / 64][d_gate, d_up][64][64]; before, what is replayed

  RowRing outputs;       // where rows of dx go; null: to the home slots
  Bits16* own_slots;     // home slots of dx, [tokens * top_k, hidden]; if there are no peers
  float* d_weight_rows;  // [rows] router weights' gradients, if they are pulled; else
  float* own_d_weight;   // [tokens * top_k]; if there are no peers
  char* const* bases;    // [ranks] where each rank's arena begins; null without peers
  int64_t x_offset;
  int64_t dy_offset;
  int64_t slots_offset;
  int64_t d_weight_offset;

  const int32_t* row_source;
  const Bits16* zeros;          // [hidden] the token of padding
  const Bits16* const* x_rows;  // [rows] where the rows' tokens lie
  const Bits16* const* dy_rows;
  const int32_t* expert_tile;
  const WorkItem* items;
  const ItemRange* range;
  const int32_t* tile_count;
  const BackwardWave* waves;
  const uint64_t* to_pull;  // [tiles] as ForwardParams::to_pull; null if nobody pulls
  uint32_t* x_pulled;       // [tiles] tokens pulled for a tile's rows; null if nobody pulls
  uint32_t* dy_pulled;      // likewise
  uint32_t* next_item;      // of the range, zero before
  uint32_t* replayed;       // [tiles] pieces of the tile's pre-activations
  uint32_t* hidden_ready;   // [tiles] pieces of the tile's gradients and weighted hidden rows
  uint32_t* wave_done;      // [waves] blocks' items that have read the rings
  int32_t* fault;           // set to 1 when a wait has expired
  const int32_t* skip;      // nothing is done, above all nothing pushed, if it is set

  float* dot_parts;  // [ring rows][inner / 128] parts of the router weights' gradients
  // The weights' gradients again, where partial sums of an expert astride waves lie meanwhile; of
  // bf16 only the upper halves, the lower ones apart.
  void* d_gate_data;  // [experts, hidden, inner]
  void* d_up_data;
  void* d_down_data;  // [experts, inner, hidden]
  uint4* lower_halves;
  int32_t dw_is_f32;

  int32_t hidden;
  int32_t inner;
  int32_t ranks;
  int32_t rank;
  int32_t tokens;
  int32_t top_k;
  int32_t choices;
  BackwardShape shape;
  Clamp clamp;
  uint64_t timeout_ns;
  int32_t peers_apart;  // see sm90/pull_share.h
  bool x_is_pushed;     // of MXFP8: tokens lie in this rank's arena, those of all ranks
  bool dy_is_pushed;    // likewise

  static constexpr bool kRecords = false;
  static constexpr bool kIsMx = false;
};

// Of the kernel that keeps a timeline.
struct RecordedBackwardParams : BackwardParams {
  Timeline timeline;

  static constexpr bool kRecords = true;
};

// Of the kernels that round hidden rows, and the gradients of gate and up, to MXFP8, and expand the
// tokens that they pull. This rank's tokens and the weights are given rounded.
struct MxBackwardParams : BackwardParams {
  static constexpr bool kIsMx = true;
};
struct RecordedMxBackwardParams : RecordedBackwardParams {
  static constexpr bool kIsMx = true;
};

cudaError_t prepare_backward(int* clusters);
cudaError_t prepare_mx_backward(int* clusters);
// Keeps a timeline if `timeline` has entries.
cudaError_t launch_backward(const BackwardParams& params, const Timeline& timeline, int clusters,
                            cudaStream_t stream);
cudaError_t launch_mx_backward(const BackwardParams& params, const Timeline& timeline, int clusters,
                               cudaStream_t stream);

}  // namespace mok::sm90
