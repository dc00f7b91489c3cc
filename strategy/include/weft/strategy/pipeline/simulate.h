#pragma once

#include "weft/strategy/pipeline/schedule.h"

#include <cstdint>
#include <span>
#include <vector>

namespace weft::strategy {

// What one stage takes for one micro-batch. Times are in any one unit.
struct StageCost {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;  // a whole backward takes the sum of its halves
  // From the end of a forward until its result has reached the next stage, and as long for the
  // gradient that comes back; nothing between stages of one rank, and no time of the sender.
  double transfer = 0;
  int64_t activation_bytes = 0;  // kept from a forward until the end of its backward
  int64_t parameter_bytes = 0;   // there all the time: parameters, gradients, optimizer states
};

// One computation of a simulated or recorded run.
struct Span {
  Action action;
  double start = 0;
  double end = 0;

  bool operator==(const Span&) const = default;
};

struct Simulation {
  double makespan = 0;                   // the time of the last end
  double bubble_fraction = 0;            // of all ranks' time, the part in which they wait
  std::vector<std::vector<Span>> ranks;  // computations alone, in order
  // By stage: the most micro-batches whose forward has been done and whose backward has not ended.
  std::vector<int64_t> in_flight;
  // By rank: the most bytes of parameters and activations at once.
  std::vector<int64_t> peak_bytes;
};

// Runs a schedule that check() accepts, with one cost for all, one for each stage, or one for each
// stage's every micro-batch, stage by stage; bytes of parameters are those of its first.
//
// Each rank does its actions in order, each as soon as its inputs are there. Sends and receives
// take none of a rank's time; without them in the schedule, messages leave as soon as they are
// computed.
//
// Throws std::invalid_argument for another number of costs, for negative ones, for a schedule
// without any action, and where check() does.
Simulation simulate(const Schedule& schedule, std::span<const StageCost> stage_costs);

}  // namespace weft::strategy
