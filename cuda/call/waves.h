#pragma once

#include <cuda_runtime_api.h>

#include "call/forward_workspace.h"
#include "call/launches.h"
#include "sm90/forward.h"

namespace mok {

// The forward pass wave by wave instead of in one launch: dispatch, gate/up with SwiGLU, down and,
// if it pushes, combine. As many waves as the worst load takes; those without rows end at once.
void launch_waves(const sm90::ForwardShape& shape, const sm90::Workspace& space,
                  const sm90::ForwardParams& all, int clusters, cudaStream_t stream,
                  Launches& launch);

}  // namespace mok
