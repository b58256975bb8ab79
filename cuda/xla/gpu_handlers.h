#pragma once

#include "xla/ffi/api/c_api.h"

// The FFI handlers of the CUDA platform for calls in which no ranks meet: those of one rank alone,
// and those between XLA's collectives.
extern "C" {

// Shared by all: prepares the device.
XLA_FFI_Error* MokDeviceInitialize(XLA_FFI_CallFrame* frame);

XLA_FFI_Error* MokForwardAlone(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokBackwardAlone(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokPlanAlone(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokPlanOfGatheredRoutesOnGpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokWeightedSumOnGpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokQuantizeOnGpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokDequantizeOnGpu(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokRoundOnGpu(XLA_FFI_CallFrame* frame);

}  // extern "C"
