#include "xla/gpu_weighted_sum.h"

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sm90/weighted_sum.h"
#include "xla/ffi/api/ffi.h"
#include "xla/gpu_device.h"
#include "xla/launches.h"

namespace mok {
namespace {

namespace ffi = xla::ffi;

template <typename T>
cudaError_t sum_slots(ffi::AnyBuffer slots, ffi::Buffer<ffi::S32> slot_rank,
                      ffi::Buffer<ffi::F32> weights, ffi::AnyBuffer out, cudaStream_t stream) {
  return sm90::weighted_sum_of_slots(
      static_cast<const T*>(slots.untyped_data()), slot_rank.typed_data(), weights.typed_data(),
      weights.dimensions()[0], weights.dimensions()[1], out.dimensions()[1],
      static_cast<T*>(out.untyped_data()), stream);
}

ffi::Error initialize(int32_t ordinal) { return failure_if(prepare_device(ordinal)); }

// slots is [tokens * top_k, width], slot_rank and weights are [tokens, top_k], out is
// [tokens, width] in the dtype of slots: f32 or bf16.
ffi::Error execute(cudaStream_t stream, ffi::AnyBuffer slots, ffi::Buffer<ffi::S32> slot_rank,
                   ffi::Buffer<ffi::F32> weights, ffi::Result<ffi::AnyBuffer> out) {
  const auto sum = slots.element_type() == ffi::F32 ? sum_slots<float> : sum_slots<uint16_t>;
  Launches launch;
  launch("weighted sum", sum(slots, slot_rank, weights, *out, stream));
  return launch.result();
}

XLA_FFI_DEFINE_HANDLER(
    initialize_handler, initialize,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER(execute_handler, execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace
}  // namespace mok

extern "C" {

XLA_FFI_Error* MokWeightedSumInitialize(XLA_FFI_CallFrame* frame) {
  return mok::initialize_handler(frame);
}
XLA_FFI_Error* MokWeightedSumExecute(XLA_FFI_CallFrame* frame) {
  return mok::execute_handler(frame);
}

}  // extern "C"
