#pragma once

#include <pybind11/pybind11.h>

namespace weft::strategy {

// Adds measured layer times to the module weft.strategy._plan. The memory model must be bound
// already, and clusters after it.
void bind_layer_times(pybind11::module_& module);

}  // namespace weft::strategy
