#pragma once

#include "weft/strategy/pipeline/generate.h"
#include "weft/strategy/pipeline/sample_time.h"
#include "weft/strategy/pipeline/simulate.h"

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace weft::strategy {

// What one stage takes, by the samples of a micro-batch.
struct StageProfile {
  SampleTime forward;
  SampleTime backward_input;
  SampleTime backward_weight;
  SampleTime transfer;                      // to the next stage and back, as in StageCost
  int64_t activation_bytes_per_sample = 0;  // kept between forward and backward
  int64_t parameter_bytes = 0;
};

struct TuneOptions {
  int64_t batch_size = 1;                        // samples of a step
  int64_t num_ranks = 1;                         // stage s is on rank s % num_ranks
  std::vector<ScheduleKind> kinds = {};          // default: all that take the stages a rank has
  std::vector<int64_t> micro_batch_counts = {};  // default: 1, 2, 3, 4, 6, 8, 12, ...
  std::optional<int64_t> memory_limit = {};      // bytes of a rank
  // Whether micro-batches that are smaller towards the batch's ends are tried, too: they fill and
  // drain a pipeline sooner.
  bool tapers = true;
};

// One point of the curve.
struct TunePoint {
  ScheduleKind kind = ScheduleKind::kNaive;
  std::vector<int64_t> micro_batch_sizes = {};  // in samples
  double makespan = 0;                          // of a step
  double bubble_fraction = 0;
  int64_t peak_bytes = 0;  // of the rank with most
  bool fits = true;        // whether peak_bytes is within the limit
};

// Simulates each schedule with each number of micro-batches, as even as can be and, where that is
// faster, in the best of tapered sizes; fastest first, those that do not fit last. Among equally
// fast ones, fewer bytes come first, then fewer micro-batches.
//
// Throws std::invalid_argument for stages that the ranks do not divide, for numbers out of range
// and for kinds that do not take the stages that a rank has.
std::vector<TunePoint> tune(std::span<const StageProfile> stages, const TuneOptions& options);

}  // namespace weft::strategy
