#include "call/mx.h"

#include "call/launches.h"
#include "sm90/mx.h"

namespace mok {
namespace {

int64_t blocks_of(const MxShape& shape) { return shape.outer * (shape.length / kMxBlock); }

template <typename T>
cudaError_t quantize(const QuantizeCall& call, cudaStream_t stream) {
  const MxArrays<T, uint8_t> arrays = {.from = static_cast<const T*>(call.values.data),
                                       .from_scales = nullptr,
                                       .to = call.elements,
                                       .to_scales = call.scales,
                                       .blocks = blocks_of(call.shape),
                                       .inner = call.shape.inner};
  return sm90::convert_mx(arrays, stream);
}

template <typename T>
cudaError_t dequantize(const DequantizeCall& call, cudaStream_t stream) {
  const MxArrays<uint8_t, T> arrays = {.from = call.elements,
                                       .from_scales = call.scales,
                                       .to = static_cast<T*>(call.values.data),
                                       .to_scales = nullptr,
                                       .blocks = blocks_of(call.shape),
                                       .inner = call.shape.inner};
  return sm90::convert_mx(arrays, stream);
}

template <typename From, typename To>
cudaError_t round(const RoundCall& call, cudaStream_t stream) {
  const MxArrays<From, To> arrays = {.from = static_cast<const From*>(call.values.data),
                                     .from_scales = nullptr,
                                     .to = static_cast<To*>(call.rounded.data),
                                     .to_scales = nullptr,
                                     .blocks = blocks_of(call.shape),
                                     .inner = call.shape.inner,
                                     .across = static_cast<To*>(call.across)};
  return sm90::convert_mx(arrays, stream);
}

}  // namespace

std::string launch_quantize_call(const QuantizeCall& call, cudaStream_t stream) {
  Launches launch;
  launch("quantize", (call.values.is_float32 ? quantize<float> : quantize<uint16_t>)(call, stream));
  return launch.result();
}

std::string launch_dequantize_call(const DequantizeCall& call, cudaStream_t stream) {
  Launches launch;
  launch("dequantize",
         (call.values.is_float32 ? dequantize<float> : dequantize<uint16_t>)(call, stream));
  return launch.result();
}

std::string launch_round_call(const RoundCall& call, cudaStream_t stream) {
  const auto of_float32 = call.rounded.is_float32 ? round<float, float> : round<float, uint16_t>;
  const auto of_bf16 = call.rounded.is_float32 ? round<uint16_t, float> : round<uint16_t, uint16_t>;
  Launches launch;
  launch("round", (call.values.is_float32 ? of_float32 : of_bf16)(call, stream));
  return launch.result();
}

}  // namespace mok
