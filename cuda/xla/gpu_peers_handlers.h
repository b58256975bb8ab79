#pragma once

#include "xla/ffi/api/c_api.h"

// The FFI handlers of the CUDA platform for calls in which ranks meet.
extern "C" {

XLA_FFI_Error* MokForwardPeersPrepare(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokForwardPeersInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokForwardPeersExecute(XLA_FFI_CallFrame* frame);

XLA_FFI_Error* MokBackwardPeersPrepare(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokBackwardPeersInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokBackwardPeersExecute(XLA_FFI_CallFrame* frame);

XLA_FFI_Error* MokPlanPeersPrepare(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokPlanPeersInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokPlanPeersExecute(XLA_FFI_CallFrame* frame);

}  // extern "C"
