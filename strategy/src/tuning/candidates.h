#pragma once

#include "cached_step_time.h"
#include "weft/strategy/tuning/search.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace weft::strategy::detail {

struct Candidate {
  TrainingSpec training;
  // The values from which a variant is chosen (variants.h).
  std::vector<bool> offloads_states;
  std::vector<bool> steps_in_backward;
  bool has_open_blocks = false;  // the number of blocks with checkpoints is not known yet
  StepTime time = {};            // of the first variant
  bool is_simulated = true;      // else, `time` is that of least_step_time
  double least_seconds = 0;      // at most the time of the variant that is chosen
  // The variant that fits, once that is known.
  std::optional<FoundLayout> chosen = {};
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

// Returns the most blocks of a pipeline rank.
int64_t most_blocks(const TrainingSpec& training);

}  // namespace weft::strategy::detail
