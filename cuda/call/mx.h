#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "call/export.h"
#include "core/mx_shape.h"

// Conversions of arrays to MXFP8 and from it, with the bits of core/mx.h.
namespace mok {

// Values, of the shape.
template <typename Pointer>
struct MxValues {
  bool is_float32;  // else they are bf16
  Pointer data;
};

struct QuantizeCall {
  MxShape shape;
  MxValues<const void*> values;
  uint8_t* elements;
  uint8_t* scales;
};

struct DequantizeCall {
  MxShape shape;
  const uint8_t* elements;
  const uint8_t* scales;
  MxValues<void*> values;
};

// Quantises and de-quantises in one.
struct RoundCall {
  MxShape shape;
  MxValues<const void*> values;
  MxValues<void*> rounded;
  void* across;  // null; or the same with blocks along `inner`, a multiple of kMxBlock
};

// Return what went wrong, or nothing.
MOK_EXPORT std::string launch_quantize_call(const QuantizeCall& call, cudaStream_t stream);
MOK_EXPORT std::string launch_dequantize_call(const DequantizeCall& call, cudaStream_t stream);
MOK_EXPORT std::string launch_round_call(const RoundCall& call, cudaStream_t stream);

}  // namespace mok
