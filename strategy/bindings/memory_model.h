#pragma once

#include "weft/strategy/memory_model.h"

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace weft::strategy {

// {category: bytes}.
pybind11::dict usage_to_dict(const MemoryUsage& usage);

// Return and read "none", "selective", "full", or "full:3" for checkpoints of the first three
// blocks. checkpointing_of throws std::invalid_argument for another text.
std::string checkpointing_name(const TrainingSpec& spec);
std::pair<Checkpointing, std::optional<int64_t>> checkpointing_of(const std::string& text);

// Return and read "none", or "cpu" for optimizer states in CPU memory. offloads_of throws
// std::invalid_argument for another text.
std::string_view offload_name(const TrainingSpec& spec);
bool offloads_of(const std::string& name);

// Returns the precision of a name such as "bf16-mixed". Throws std::invalid_argument for another
// name.
Precision precision_of(const std::string& name);

// Adds the memory model to the module weft.strategy._plan. Mesh and Plan must be bound already.
void bind_memory_model(pybind11::module_& module);

}  // namespace weft::strategy
