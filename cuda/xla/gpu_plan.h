#pragma once

#include <cstdint>

#include "core/plan.h"
#include "xla/ffi/api/c_api.h"

namespace mok {

// Of the workspace that one plan call needs beside its operand and results.
int64_t plan_workspace_bytes(const PlanShape& shape);

}  // namespace mok

// The FFI handlers of the CUDA platform: the plan of one rank alone, with peers, and of routes that
// XLA has gathered.
extern "C" {

XLA_FFI_Error* MokPlanAloneInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokPlanAloneExecute(XLA_FFI_CallFrame* frame);

XLA_FFI_Error* MokPlanPeersPrepare(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokPlanPeersInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokPlanPeersExecute(XLA_FFI_CallFrame* frame);

XLA_FFI_Error* MokPlanOfGatheredRoutesInitialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MokPlanOfGatheredRoutesExecute(XLA_FFI_CallFrame* frame);

}  // extern "C"
