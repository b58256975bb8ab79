#pragma once

#include <cuda_runtime_api.h>

#include "core/plan.h"
#include "sm90/work.h"

// The forward kernel's work list, from a rank's plan in tiles of kTileRows rows.
namespace mok::sm90 {

struct WorkList {
  WorkItem* items;  // [max_items]
  ItemRange* all_items;
  int32_t* tile_count;
  Wave* waves;         // [wave_count], empty past the last step
  int32_t wave_count;  // 0 unless the shape has no lag
};

int64_t max_items(const PlanShape& plan, const WorkShape& shape);

cudaError_t list_work(const PlanShape& plan, const WorkShape& shape, const int32_t* expert_tile,
                      const WorkList& list, cudaStream_t stream);

// Loads the kernel onto the current device.
cudaError_t load_work_list();

}  // namespace mok::sm90
