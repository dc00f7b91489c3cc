#pragma once

#include "candidates.h"

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace weft::strategy::detail {

// The ways in which the ranks of a candidate can keep the optimizer's states and step: on the
// device, or offloaded; after the backward, or in it.

// Return the values that are possible: Adagrad never steps in the backward, and with zero_stage 1,
// shards are stepped after it and states are not offloaded.
std::vector<bool> step_options_of(const LayoutSearch& search);
std::vector<bool> step_options_of(const LayoutSearch& search, const TrainingSpec& training);
std::vector<bool> offload_options_of(const LayoutSearch& search);
std::vector<bool> offload_options_of(const LayoutSearch& search, const TrainingSpec& training);

struct Variant {
  TrainingSpec training;
  double least_seconds = 0;  // with offload: of a step, without the waits of a pipeline
};

// Returns the variants of a candidate in the order in which they are preferred: without offload,
// where steps take as long in the backward as after it; then offloaded ones, the fastest first.
std::vector<Variant> variants_of(const Candidate& candidate, WorkCache& cache);

// Sets the times of a candidate. `simulates`: see cached_step_time.h.
void predict_times(Candidate& candidate, WorkCache& cache, bool simulates);

// The CPU memory of the hosts of a cluster. Not thread-safe.
class HostMemory {
 public:
  explicit HostMemory(const Cluster& cluster) : cluster_(cluster) {}

  // Returns whether the states that a training offloads fit. Keeps the results for trainings that
  // differ only in their batch, micro-batches, checkpoints, sequence parallelism and steps.
  bool fits(const TrainingSpec& training);

 private:
  // The mesh, the ZeRO stage, and the first blocks and the schedule of stages.
  using Key = std::tuple<std::string, int64_t, std::vector<int64_t>, ScheduleKind>;

  const Cluster& cluster_;
  std::map<Key, bool> known_;
};

}  // namespace weft::strategy::detail
