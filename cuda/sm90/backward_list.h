#pragma once

#include <cuda_runtime_api.h>

#include "core/plan.h"
#include "sm90/backward_work.h"

// The backward kernel's work list, where its rows' tokens lie, and which of them it pulls, from a
// rank's plan.
namespace mok::sm90 {

struct BackwardList {
  WorkItem* items;         // [max_backward_items]
  BackwardWave* waves;     // [max_backward_waves + 1], the last one behind the end
  BackwardRanges* ranges;  // [max_backward_waves], zero before
  ItemRange* all_items;
  int32_t* wave_count;
  int32_t* tile_count;
  // [rows] where the rows' tokens lie: of this rank, received, or zeros if there is none.
  const uint16_t** x_rows;
  const uint16_t** dy_rows;
  int32_t* first_row;  // [ranks * tokens], large before: the row that first needs a token; null if
                       // nobody pulls
  uint64_t* to_pull;   // [tiles], zero before; null if nobody pulls
};

int64_t max_backward_items(const PlanShape& plan, const BackwardShape& shape);

// Where a row's token lies.
struct TokenPlaces {
  const uint16_t* own;       // [tokens, width] of this rank
  const uint16_t* received;  // [ranks, tokens, width] the peers'
  const uint16_t* ring;      // [ring rows, width] where rows are dispatched; or null
};

struct BackwardTokens {
  TokenPlaces x;
  TokenPlaces dy;
  const uint16_t* zeros;  // [width]
  int64_t width;
};

// Tiles whose pre-activations have been saved.
struct SavedTiles {
  int32_t tiles;
  int32_t beside_parts;  // those that partial sums leave, if an expert is split among waves
};

// Sets *failed, and lists nothing, if the forward call has left no plan.
cudaError_t list_backward(const PlanShape& plan, const BackwardShape& shape, int32_t rank,
                          const SavedTiles& saved, const int32_t* expert_tile,
                          const int32_t* row_source, const BackwardTokens& tokens,
                          const BackwardList& list, int32_t* failed, cudaStream_t stream);

cudaError_t load_backward_list();

}  // namespace mok::sm90
