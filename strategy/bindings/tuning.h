#pragma once

#include <pybind11/pybind11.h>

namespace weft::strategy {

// Adds clusters and the search of layouts to the module weft.strategy._plan. The memory model must
// be bound already.
void bind_tuning(pybind11::module_& module);

}  // namespace weft::strategy
