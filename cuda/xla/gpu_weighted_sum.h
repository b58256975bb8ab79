#pragma once

#include "xla/ffi/api/c_api.h"

// The FFI handlers of the CUDA platform: the weighted sum of rows in their home slots.
extern "C" {

XLA_FFI_Error* MokWeightedSumInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokWeightedSumExecute(XLA_FFI_CallFrame* frame);

}  // extern "C"
