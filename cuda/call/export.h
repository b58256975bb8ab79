#pragma once

// Marks what the library of the GPU kernels shows to the modules of handlers; all else is hidden.
#define MOK_EXPORT __attribute__((visibility("default")))
