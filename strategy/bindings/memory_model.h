#pragma once

#include "weft/strategy/memory_model.h"

#include <pybind11/pybind11.h>

#include <string>

namespace weft::strategy {

// {category: bytes}.
pybind11::dict usage_to_dict(const MemoryUsage& usage);

// "none", "selective" or "full". checkpointing_of throws std::invalid_argument for another name.
std::string checkpointing_name(Checkpointing checkpointing);
Checkpointing checkpointing_of(const std::string& name);

// Adds the memory model to the module weft.strategy._plan. Mesh and Plan must be bound already.
void bind_memory_model(pybind11::module_& module);

}  // namespace weft::strategy
