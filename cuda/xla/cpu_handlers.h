#pragma once

#include "xla/ffi/api/c_api.h"

// The FFI handlers of the CPU platform.
extern "C" {

// Shared by the calls at which ranks meet: gives every call site of a program its own identity.
XLA_FFI_Error* MokCallSite(XLA_FFI_CallFrame* frame);

XLA_FFI_Error* MokPlan(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokPlanOfGatheredRoutes(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokDispatch(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokCombine(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokWeightedSum(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokQuantize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokDequantize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokRound(XLA_FFI_CallFrame* frame);

}  // extern "C"
