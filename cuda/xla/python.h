#pragma once

#include <nanobind/nanobind.h>

#include "core/fault.h"
#include "host/faults.h"
#include "xla/ffi/api/c_api.h"

// What all modules hand to Python.
namespace mok {

inline nanobind::capsule capsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
  return nanobind::capsule(reinterpret_cast<void*>(handler));
}

// A fault as Python's `_native.Fault`.
inline nanobind::dict fault_dict(const Fault& fault) {
  nanobind::dict record;
  record["kind"] = name(fault.kind);
  record["operation"] = name(fault.operation);
  record["group"] = fault.group;
  record["rank"] = fault.rank;
  record["peer"] = fault.peer;
  record["expected"] = fault.expected;
  record["seen"] = fault.seen;
  record["device"] = fault.device;
  return record;
}

}  // namespace mok
