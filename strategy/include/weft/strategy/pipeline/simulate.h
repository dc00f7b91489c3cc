#pragma once

#include "weft/strategy/pipeline/schedule.h"

#include <cstdint>
#include <span>
#include <vector>

namespace weft::strategy {

// The cost of one stage for one micro-batch. All times are in one unit, which the caller chooses.
struct StageCost {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;  // the time of a full backward is the sum of both
  // The time from the end of a forward until its output arrives at the next stage, and the time of
  // the gradient in the opposite direction. Stages of one rank transfer nothing. A transfer does
  // not occupy the sender.
  double transfer = 0;
  int64_t activation_bytes = 0;  // kept from a forward until the end of its backward
  int64_t parameter_bytes = 0;   // always held: parameters, gradients, optimizer states
};

// One computation of a simulated or recorded run.
struct Span {
  Action action;
  double start = 0;
  double end = 0;

  bool operator==(const Span&) const = default;
};

struct Simulation {
  double makespan = 0;                   // the end of the last computation
  double bubble_fraction = 0;            // the fraction of all ranks' time in which they are idle
  std::vector<std::vector<Span>> ranks;  // computations only, in order
  // By stage: the most micro-batches at once whose forward is done and whose backward is not.
  std::vector<int64_t> in_flight;
  // By rank: the most bytes of parameters and activations at once.
  std::vector<int64_t> peak_bytes;
};

// Simulates a schedule that check() accepts with channels of unlimited capacity. `stage_costs` has
// one cost for all stages, one for each stage, or one for each stage and micro-batch, stage by
// stage. In the last case, a stage's parameter bytes are those of the cost of its first
// micro-batch.
//
// Each rank executes its actions in order, each as soon as its inputs have arrived. Sends and
// receives take no time on a rank; in a schedule without sends, messages are sent as soon as they
// are computed.
//
// Throws std::invalid_argument for any other number of costs, for costs out of range, for a
// schedule without actions, and if check() throws.
Simulation simulate(const Schedule& schedule, std::span<const StageCost> stage_costs);

}  // namespace weft::strategy
