#include "weft/strategy/tuning/search.h"

#include "../memory/parameters.h"
#include "candidates.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>

namespace weft::strategy {

namespace {

using detail::Candidate;
using detail::Candidates;
using detail::candidates_of;
using detail::most_blocks;
using detail::step_options_of;

// The candidates, the fastest first; and of equal ones, the first that was added.
class Queue {
 public:
  explicit Queue(std::vector<Candidate> candidates) : candidates_(std::move(candidates)) {
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      push(i);
    }
  }

  [[nodiscard]] bool empty() const { return order_.empty(); }
  // Removes the first one, and returns its index.
  std::size_t pop() {
    const std::size_t idx = order_.top().second;
    order_.pop();
    return idx;
  }
  void push(std::size_t idx) { order_.emplace(candidates_[idx].time.total(), idx); }
  Candidate& operator[](std::size_t idx) { return candidates_[idx]; }

 private:
  using Entry = std::pair<double, std::size_t>;
  std::vector<Candidate> candidates_;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> order_;
};

// Returns the largest usage of a rank; or, if it is above `enough`, that of any rank above it.
MemoryUsage largest_usage(const TrainingSpec& training, int64_t enough) {
  MemoryUsage largest;
  for (const RankClass& each : distinct_ranks(training)) {
    for (const PhaseMemory& phase : predict_memory(training, each.global_rank)) {
      if (phase.at_peak.total() > largest.total()) {
        largest = phase.at_peak;
      }
    }
    if (largest.total() > enough) {
      break;
    }
  }
  return largest;
}

// Sets the least number of blocks with checkpoints that fit, and steps in the backward if none fits
// without. Returns false if the training fits without checkpoints, or not with those of all blocks
// but one.
bool close_blocks(TrainingSpec& training, const LayoutSearch& search) {
  const auto fits = [&](TrainingSpec& candidate, int64_t blocks) {
    candidate.checkpointing = blocks == 0 ? Checkpointing::kNone : Checkpointing::kFull;
    candidate.checkpointed_blocks = blocks == 0 ? std::nullopt : std::optional(blocks);
    return largest_usage(candidate, search.memory_limit).total() <= search.memory_limit;
  };
  TrainingSpec candidate = training;
  const std::vector<bool> step_options = step_options_of(search, training);
  for (const bool steps_in_backward : step_options) {
    candidate.steps_in_backward = steps_in_backward;
    if (fits(candidate, 0)) {
      return false;
    }
  }
  for (const bool steps_in_backward : step_options) {
    candidate.steps_in_backward = steps_in_backward;
    int64_t least = most_blocks(training) - 1;
    if (!fits(candidate, least)) {
      continue;
    }
    int64_t too_few = 0;
    while (too_few + 1 < least) {
      const int64_t middle = (too_few + least) / 2;
      (fits(candidate, middle) ? least : too_few) = middle;
    }
    candidate.checkpointing = Checkpointing::kFull;
    candidate.checkpointed_blocks = least;
    training = std::move(candidate);
    return true;
  }
  return false;
}

// Returns fewer bytes than the parameters and optimizer states of all ranks together, each once.
double least_state_bytes(const TrainingSpec& training) {
  TrainingSpec one = training;
  one.mesh = Mesh();
  one.pipeline = {};
  one.zero_stage = 3;
  one.micro_batches = 1;
  one.sequences = 1;
  one.steps_in_backward = true;  // leaves the gradients out
  one.steps_by_rows = false;
  if (one.optimizer == OptimizerKind::kAdagrad) {
    one.optimizer = OptimizerKind::kSgdMomentum;  // which has one state, too, and may step there
  }
  one.precision =
      training.precision == Precision::kHalfTrue ? training.precision : Precision::k32True;
  one.weights = WeightFormat::kLikePrecision;
  one.checkpointing = Checkpointing::kNone;
  one.checkpointed_blocks = {};
  const bool has_other_weights = training.weights != WeightFormat::kLikePrecision;
  const ParameterCost cost = parameter_cost(one);
  const double bytes = static_cast<double>(cost.num_elements) * cost.bytes_per_element;
  return bytes * (has_other_weights ? 0.5 : 1.0);  // split weights take 3 or 4 bytes instead of 4
}

// Returns the share of such bytes of a rank: replicas all hold the same ones.
int64_t share_of(double state_bytes, const Mesh& mesh) {
  const int64_t num_replicas = mesh.has_axis("data_replicate") ? mesh.size("data_replicate") : 1;
  return static_cast<int64_t>(state_bytes) / (mesh.size() / num_replicas);
}

void check(const LayoutSearch& search) {
  for (const auto& [name, number] :
       {std::pair<std::string, int64_t>{"num_devices", search.num_devices},
        {"global_sequences", search.global_sequences},
        {"memory_limit", search.memory_limit},
        {"max_results", search.max_results}}) {
    if (number < 1) {
      throw std::invalid_argument("tune: got " + name + " = " + std::to_string(number) +
                                  "; give a number from 1");
    }
  }
  if (search.zero_stages.empty() || search.checkpointing.empty() ||
      search.steps_in_backward.empty() || search.sequence_parallel.empty()) {
    throw std::invalid_argument(
        "tune: got no values for the ZeRO stage, checkpointing, steps in the backward or sequence "
        "parallelism; give at least one of each");
  }
  if (step_options_of(search).empty()) {
    throw std::invalid_argument(
        "tune: Adagrad does not step inside the backward; use SGD, Adam or AdamW, or step after "
        "it");
  }
}

[[noreturn]] void refuse(const LayoutSearch& search, const Candidates& found) {
  if (!found.has_valid_tensor_size && !found.rejections.empty()) {
    throw std::invalid_argument("tune: no layout of " + std::to_string(search.num_devices) +
                                " devices is valid: " + found.rejections.front().reason);
  }
  throw std::invalid_argument(
      "tune: got " + std::to_string(search.num_devices) + " devices and " +
      std::to_string(search.global_sequences) +
      " sequences for a step, which no layout divides with the sizes that are fixed; give a "
      "multiple of the data-parallel ranks, or fix other sizes (a pipeline has at most as many "
      "ranks as the model has blocks, and accumulates nothing)");
}

}  // namespace

LayoutSearchResult search_layouts(const LayoutSearch& search) {
  check(search);
  Candidates found = candidates_of(search);
  if (found.candidates.empty()) {
    refuse(search, found);
  }
  LayoutSearchResult result;
  result.rejections = std::move(found.rejections);
  result.num_candidates =
      std::count_if(found.candidates.begin(), found.candidates.end(), [](const auto& candidate) {
        return !candidate.has_open_blocks;
      });
  const double state_bytes = least_state_bytes(search.training);
  Queue queue(std::move(found.candidates));
  while (!queue.empty() && std::cmp_less(result.layouts.size(), search.max_results)) {
    const std::size_t idx = queue.pop();
    Candidate& candidate = queue[idx];
    const int64_t bound = share_of(state_bytes, candidate.training.mesh);
    const bool may_fit = bound <= search.memory_limit;
    if (candidate.has_open_blocks) {
      if (may_fit && close_blocks(candidate.training, search)) {
        candidate.has_open_blocks = false;
        candidate.time = detail::step_time(candidate.training, found.cache, false);
        queue.push(idx);
      }
      continue;
    }
    const bool may_be_smallest =
        result.layouts.empty() && (!result.smallest || bound < result.smallest->at_peak.total());
    if (!candidate.is_simulated && (may_fit || may_be_smallest)) {
      candidate.time = detail::step_time(candidate.training, found.cache, true);
      candidate.is_simulated = true;
      queue.push(idx);
      continue;
    }
    bool fits = false;
    for (const bool steps_in_backward : step_options_of(search, candidate.training)) {
      if (fits || !(may_fit || may_be_smallest)) {
        break;
      }
      candidate.training.steps_in_backward = steps_in_backward;
      const int64_t least = !result.layouts.empty() ? 0
                            : result.smallest       ? result.smallest->at_peak.total()
                                                    : std::numeric_limits<int64_t>::max();
      FoundLayout layout = {
          .training = candidate.training,
          .time = candidate.time,
          .at_peak = largest_usage(candidate.training, std::max(search.memory_limit, least))};
      fits = layout.at_peak.total() <= search.memory_limit;
      if (fits) {
        result.layouts.push_back(std::move(layout));
      } else if (!result.smallest || layout.at_peak.total() < result.smallest->at_peak.total()) {
        result.smallest = std::move(layout);
      }
    }
    result.num_above_limit += fits ? 0 : 1;
  }
  if (!result.layouts.empty()) {
    result.smallest.reset();
  }
  return result;
}

std::vector<FoundLayout> search_front(const LayoutSearch& search) {
  check(search);
  Candidates found = candidates_of(search);
  if (found.candidates.empty()) {
    refuse(search, found);
  }
  const double state_bytes = least_state_bytes(search.training);
  std::vector<FoundLayout> front;
  int64_t least = std::numeric_limits<int64_t>::max();
  Queue queue(std::move(found.candidates));
  while (!queue.empty()) {
    const std::size_t idx = queue.pop();
    Candidate& candidate = queue[idx];
    if (candidate.has_open_blocks || share_of(state_bytes, candidate.training.mesh) >= least) {
      continue;
    }
    if (!candidate.is_simulated) {
      candidate.time = detail::step_time(candidate.training, found.cache, true);
      candidate.is_simulated = true;
      queue.push(idx);
      continue;
    }
    for (const bool steps_in_backward : step_options_of(search, candidate.training)) {
      candidate.training.steps_in_backward = steps_in_backward;
      const MemoryUsage usage = largest_usage(candidate.training, least);
      if (usage.total() >= least) {
        continue;
      }
      least = usage.total();
      if (!front.empty() && front.back().time.total() == candidate.time.total()) {
        front.pop_back();  // as fast, with more bytes
      }
      front.push_back({.training = candidate.training, .time = candidate.time, .at_peak = usage});
    }
  }
  return front;
}

}  // namespace weft::strategy
