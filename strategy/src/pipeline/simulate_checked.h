#pragma once

#include "weft/strategy/pipeline/simulate.h"

#include <span>

namespace weft::strategy::detail {

// Like simulate(), but does not call check(). REQUIRES: check() accepts the schedule.
Simulation simulate_checked(const Schedule& schedule, std::span<const StageCost> stage_costs);

}  // namespace weft::strategy::detail
