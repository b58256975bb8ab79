#include <cstdint>

#include "device/load_kernels.h"
#include "device/warp.cuh"
#include "sm90/mx.h"

namespace mok::sm90 {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;

__device__ int64_t warp_of_grid() {
  return int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp;
}

__device__ int lane_of_warp() { return static_cast<int>(threadIdx.x) % kWarp; }

// The largest of so many lanes that follow each other.
template <int kLanes>
__device__ uint32_t largest_of_lanes(uint32_t magnitude) {
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    magnitude = max(magnitude, __shfl_xor_sync(kAllLanes, magnitude, offset));
  }
  return magnitude;
}

// Any array. A thread converts a block.
template <typename From, typename To>
__global__ void __launch_bounds__(kThreads)
    convert_blocks(const __grid_constant__ MxArrays<From, To> arrays) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t block = index / arrays.inner;
  if (block < arrays.blocks) {
    const int64_t column = index - block * arrays.inner;
    mx_convert_block(arrays, arrays.to, block * kMxBlock * arrays.inner + column, index,
                     arrays.inner);
  }
}

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads)
    convert_contiguous(const __grid_constant__ MxArrays<From, To> arrays) {
  using Lane = MxContiguousLane<From, To>;
  Lane lane(arrays, warp_of_grid(), lane_of_warp());
  lane.load();
  if constexpr (!kIsElements<From>) {
#pragma unroll
    for (uint32_t& magnitude : lane.largest) {
      magnitude = largest_of_lanes<Lane::kLanesPerBlock>(magnitude);
    }
  }
  if (__any_sync(kAllLanes, !lane.is_finite())) {
    lane.convert_carefully();
  } else {
    lane.convert();
  }
}

// With kAcross, along the rows too.
template <typename From, typename To, bool kAcross>
__global__ void __launch_bounds__(kThreads)
    convert_strided(const __grid_constant__ MxArrays<From, To> arrays) {
  using Lane = MxStridedLane<From, To>;
  Lane lane(arrays, static_cast<uint32_t>(warp_of_grid()), lane_of_warp());
  lane.load();
  if constexpr (!kIsElements<From>) {
#pragma unroll
    for (uint32_t& word : lane.largest.word) {
#pragma unroll
      for (int offset = Lane::kLanesAcross; offset < kWarp; offset *= 2) {
        word = mx_larger<From>(word, __shfl_xor_sync(kAllLanes, word, offset));
      }
    }
  }
  // A warp's blocks across the rows have no other numbers than those along the columns.
  if (__any_sync(kAllLanes, !lane.is_finite())) {
    lane.convert_carefully();
    if constexpr (kAcross) {
      lane.convert_across_carefully();
    }
    return;
  }
  lane.convert();
  if constexpr (kAcross) {
#pragma unroll
    for (int i = 0; i < Lane::kRows; ++i) {
      lane.convert_across(i, largest_of_lanes<Lane::kLanesPerBlockAcross>(lane.largest_across(i)));
    }
  }
}

unsigned blocks_of(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

template <typename Arrays>
cudaError_t launch(void (*kernel)(Arrays), const Arrays& arrays, int64_t threads,
                   cudaStream_t stream) {
  kernel<<<blocks_of(threads), kThreads, 0, stream>>>(arrays);
  return cudaGetLastError();
}

template <typename T, int kCount>
bool is_aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % (sizeof(T) * kCount) == 0;
}

// Whether lanes can read and write vectors. XLA may hand out a slice of an array.
template <typename From, typename To>
bool is_aligned(const MxArrays<From, To>& arrays) {
  constexpr int kVector = kMxVector<From, To>;
  return is_aligned<From, kVector>(arrays.from) && is_aligned<To, kVector>(arrays.to) &&
         is_aligned<To, kVector>(arrays.across) &&
         (arrays.inner == 1 ||
          (arrays.inner % kVector == 0 && is_aligned<uint8_t, kVector>(arrays.from_scales) &&
           is_aligned<uint8_t, kVector>(arrays.to_scales)));
}

}  // namespace

template <typename From, typename To>
cudaError_t convert_mx(const MxArrays<From, To>& arrays, cudaStream_t stream) {
  const int64_t scales = arrays.blocks * arrays.inner;
  if (scales == 0) {
    return cudaSuccess;
  }
  const bool vectors = is_aligned(arrays);
  if (arrays.across != nullptr && (!vectors || arrays.inner == 1)) {
    MxArrays<From, To> one = arrays;
    one.across = nullptr;
    const cudaError_t error = convert_mx(one, stream);
    one.to = arrays.across;
    one.blocks = scales;
    one.inner = 1;
    return error == cudaSuccess ? convert_mx(one, stream) : error;
  }
  if (!vectors) {
    return launch(convert_blocks<From, To>, arrays, scales, stream);
  }
  if (arrays.inner == 1) {
    constexpr int kBlocksPerWarp = MxContiguousLane<From, To>::kBlocksPerWarp;
    const int64_t warps = (scales + kBlocksPerWarp - 1) / kBlocksPerWarp;
    return launch(convert_contiguous<From, To>, arrays, warps * kWarp, stream);
  }
  constexpr int kColumnsPerWarp = MxStridedLane<From, To>::kColumnsPerWarp;
  const int64_t threads = (scales + kColumnsPerWarp - 1) / kColumnsPerWarp * kWarp;
  if constexpr (!kIsElements<From> && !kIsElements<To>) {
    if (arrays.across != nullptr) {
      return launch(convert_strided<From, To, true>, arrays, threads, stream);
    }
  }
  return launch(convert_strided<From, To, false>, arrays, threads, stream);
}

template cudaError_t convert_mx(const MxArrays<float, uint8_t>&, cudaStream_t);
template cudaError_t convert_mx(const MxArrays<uint16_t, uint8_t>&, cudaStream_t);
template cudaError_t convert_mx(const MxArrays<uint8_t, float>&, cudaStream_t);
template cudaError_t convert_mx(const MxArrays<uint8_t, uint16_t>&, cudaStream_t);
template cudaError_t convert_mx(const MxArrays<float, float>&, cudaStream_t);
template cudaError_t convert_mx(const MxArrays<float, uint16_t>&, cudaStream_t);
template cudaError_t convert_mx(const MxArrays<uint16_t, float>&, cudaStream_t);
template cudaError_t convert_mx(const MxArrays<uint16_t, uint16_t>&, cudaStream_t);

namespace {

template <typename From, typename To>
cudaError_t load_conversion() {
  const cudaError_t error = load_kernels(convert_blocks<From, To>, convert_contiguous<From, To>,
                                         convert_strided<From, To, false>);
  if constexpr (!kIsElements<From> && !kIsElements<To>) {
    return error == cudaSuccess ? load_kernels(convert_strided<From, To, true>) : error;
  }
  return error;
}

}  // namespace

cudaError_t load_mx() {
  cudaError_t error = cudaSuccess;
  for (const auto load : {load_conversion<float, uint8_t>, load_conversion<uint16_t, uint8_t>,
                          load_conversion<uint8_t, float>, load_conversion<uint8_t, uint16_t>,
                          load_conversion<float, float>, load_conversion<float, uint16_t>,
                          load_conversion<uint16_t, float>, load_conversion<uint16_t, uint16_t>}) {
    if (error == cudaSuccess) error = load();
  }
  return error;
}

}  // namespace mok::sm90
