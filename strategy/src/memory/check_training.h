#pragma once

#include "weft/strategy/memory_model.h"

namespace weft::strategy::detail {

// Throws std::invalid_argument for a training that predict_memory rejects.
void check_training(const TrainingSpec& spec);

// Throws std::invalid_argument if the optimizer or the device excludes offloads_states, which need
// not be set.
void check_offload(const TrainingSpec& spec);

}  // namespace weft::strategy::detail
