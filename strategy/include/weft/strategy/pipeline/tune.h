#pragma once

#include "weft/strategy/pipeline/generate.h"
#include "weft/strategy/pipeline/sample_time.h"
#include "weft/strategy/pipeline/simulate.h"

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace weft::strategy {

// The cost of one stage as a function of the samples of a micro-batch.
struct StageProfile {
  SampleTime forward;
  SampleTime backward_input;
  SampleTime backward_weight;
  SampleTime transfer;                      // in each direction, as in StageCost
  int64_t activation_bytes_per_sample = 0;  // kept between forward and backward
  int64_t parameter_bytes = 0;
};

struct TuneOptions {
  int64_t batch_size = 1;  // samples of a step
  int64_t num_ranks = 1;   // the stages are on the ranks of place_stages()
  // Default with one stage per rank: naive, gpipe, 1f1b and zero_bubble. With several: naive,
  // interleaved and looped_bfs; with two, also zbv, dualpipev, v_half and v_min.
  std::vector<ScheduleKind> kinds = {};
  std::vector<int64_t> micro_batch_counts = {};  // default: 1, 2, 3, 4, 6, 8, 12, ...
  std::optional<int64_t> memory_limit = {};      // the most bytes of a rank
  // Whether to also try micro-batches that are smaller towards the batch's ends, which shortens
  // warm-up and cool-down.
  bool tapers = true;
};

// One simulated configuration.
struct TunePoint {
  ScheduleKind kind = ScheduleKind::kNaive;
  std::vector<int64_t> micro_batch_sizes = {};  // in samples
  double makespan = 0;                          // the time of a step, in the unit of the profiles
  double bubble_fraction = 0;
  int64_t peak_bytes = 0;  // of the rank with the most
  bool fits = true;        // whether peak_bytes is within the limit
};

// Simulates each kind of schedule with each number of micro-batches, with the most even split of
// the batch. Except for naive, the result also has the best split of tapered_sizes(), if that split
// is faster or is the only one within the memory limit. Returns the fastest first and those above
// the memory limit last; ties are ordered by bytes, then by the number of micro-batches.
//
// Throws std::invalid_argument if the stages are not a multiple of the ranks, for numbers out of
// range and for kinds that do not support the number of stages per rank.
std::vector<TunePoint> tune(std::span<const StageProfile> stages, const TuneOptions& options);

}  // namespace weft::strategy
