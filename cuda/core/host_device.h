#pragma once

// Headers in core/ are read by the host compiler and, unchanged, by nvcc.
#ifdef __CUDACC__
#define MOK_HOST_DEVICE __host__ __device__
#else
#define MOK_HOST_DEVICE
#endif
