#pragma once

#include "xla/ffi/api/c_api.h"

// The FFI handlers of the CUDA platform: the forward pass of one rank alone, and with peers.
extern "C" {

XLA_FFI_Error* MokForwardAloneInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokForwardAloneExecute(XLA_FFI_CallFrame* frame);

XLA_FFI_Error* MokForwardPeersPrepare(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokForwardPeersInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokForwardPeersExecute(XLA_FFI_CallFrame* frame);

}  // extern "C"
