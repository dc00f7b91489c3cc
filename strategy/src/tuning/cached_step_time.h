#pragma once

#include "layer_work.h"
#include "weft/strategy/tuning/step_time.h"

#include <cstdint>
#include <vector>

namespace weft::strategy::detail {

// The functions of step_time.h for many trainings of one search. They do not check the spec.
//
// `simulates`: whether the schedule of a pipeline is simulated, as predict_step_time does, and
// least_step_time does not.
StepTime step_time(const TrainingSpec& spec, WorkCache& cache, bool simulates);
std::vector<int64_t> even_stages(const TrainingSpec& spec, WorkCache& cache, int64_t num_stages);

}  // namespace weft::strategy::detail
