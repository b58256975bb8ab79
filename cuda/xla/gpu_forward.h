#pragma once

#include <vector>

#include "core/fault.h"
#include "xla/ffi/api/c_api.h"

namespace mok {

// What the GPU calls of this process recorded since the last look.
std::vector<Fault> take_gpu_faults();

}  // namespace mok

// The FFI handlers of the CUDA platform: the forward pass of one rank alone, and with peers.
extern "C" {

XLA_FFI_Error* MokForwardAloneInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokForwardAloneExecute(XLA_FFI_CallFrame* frame);

XLA_FFI_Error* MokForwardPeersPrepare(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokForwardPeersInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokForwardPeersExecute(XLA_FFI_CallFrame* frame);

}  // extern "C"
