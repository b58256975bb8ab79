#pragma once

// Headers in core/ are read by the host compiler and, unchanged, by nvcc.
#ifdef __CUDACC__
#define MOK_HOST_DEVICE __host__ __device__
#else
#define MOK_HOST_DEVICE
#endif

// Before a loop over registers.
#ifdef __CUDA_ARCH__
#define MOK_UNROLL _Pragma("unroll")
#else
#define MOK_UNROLL
#endif
