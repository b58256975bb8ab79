#pragma once

#include <cuda_runtime_api.h>

#include "core/injection.h"

// The source files whose kernels have hooks, in a build for tests: each holds a pointer of its own
// to what its kernels are to commit.
namespace mok::inject {

// Sets that of one file on the current device; null for nothing.
using Setter = cudaError_t (*)(Injection* injection);

// Adds that of a file, when the library is loaded. True, for the initialiser of a variable.
bool list_setter(Setter setter);

}  // namespace mok::inject
