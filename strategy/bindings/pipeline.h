#pragma once

#include <pybind11/pybind11.h>

namespace weft::strategy {

// Adds schedules, their passes, the simulator, partition and tune to the module
// weft.strategy._plan.
void bind_pipeline(pybind11::module_& module);

}  // namespace weft::strategy
