#pragma once

#include <pybind11/pybind11.h>

namespace weft::strategy {

// Adds the memory model to the module weft.strategy._plan. Mesh and Plan must be bound already.
void bind_memory_model(pybind11::module_& module);

}  // namespace weft::strategy
