#pragma once

#include "cached_step_time.h"
#include "weft/strategy/tuning/search.h"

#include <cstdint>
#include <vector>

namespace weft::strategy::detail {

struct Candidate {
  TrainingSpec training;
  StepTime time;
  bool is_simulated = true;      // else, `time` is that of least_step_time
  bool has_open_blocks = false;  // the number of blocks with checkpoints is not known yet
};

struct Candidates {
  std::vector<Candidate> candidates;
  std::vector<Rejection> rejections;
  bool has_valid_tensor_size = false;
  WorkCache cache;  // for the times of further candidates of the same search
};

// Returns all candidates of a search in any order; none if no size is possible. Does not check the
// search.
Candidates candidates_of(const LayoutSearch& search);

// Returns the values of steps_in_backward that are possible: Adagrad never steps there, and with
// zero_stage 1 shards are stepped after the backward.
std::vector<bool> step_options_of(const LayoutSearch& search);
std::vector<bool> step_options_of(const LayoutSearch& search, const TrainingSpec& training);

// Returns the most blocks of a pipeline rank.
int64_t most_blocks(const TrainingSpec& training);

}  // namespace weft::strategy::detail
