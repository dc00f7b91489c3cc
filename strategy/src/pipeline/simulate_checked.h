#pragma once

#include "weft/strategy/pipeline/simulate.h"

#include <span>

namespace weft::strategy::detail {

// simulate() without check(), for a schedule that check() is known to accept.
Simulation simulate_checked(const Schedule& schedule, std::span<const StageCost> stage_costs);

}  // namespace weft::strategy::detail
