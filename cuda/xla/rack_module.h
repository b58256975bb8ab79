#pragma once

#include <nanobind/nanobind.h>

namespace mok {

// Hands the simulation of a rack to Python.
void bind_rack(nanobind::module_& module);

}  // namespace mok
