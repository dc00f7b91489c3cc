#pragma once

#include <pybind11/pybind11.h>

namespace weft::strategy {

// Adds cpu_generator_after to the module weft.strategy._plan.
void bind_mersenne_twister(pybind11::module_& module);

}  // namespace weft::strategy
