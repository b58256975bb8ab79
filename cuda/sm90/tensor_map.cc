#include "sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include <type_traits>

#include "sm90/tile.h"

namespace mok::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Through the runtime, so that the library does not link against the driver.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &result);
  const bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  return found ? reinterpret_cast<Encode>(function) : nullptr;
}

}  // namespace

template <typename Value>
bool encode_matrix(CUtensorMap* map, const Value* data, int64_t rows, int64_t columns,
                   int box_rows) {
  constexpr bool kIsFloat = std::is_same_v<Value, float>;
  static const Encode encode = find_encode();
  if (encode == nullptr) {
    return false;
  }
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * sizeof(Value)};
  const cuuint32_t box[2] = {kSwizzleBytes / sizeof(Value), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[2] = {1, 1};
  return encode(map, kIsFloat ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2, const_cast<Value*>(data), sizes, strides, box, element_strides,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template bool encode_matrix(CUtensorMap*, const uint16_t*, int64_t, int64_t, int);
template bool encode_matrix(CUtensorMap*, const float*, int64_t, int64_t, int);

}  // namespace mok::sm90
