#include "weft/strategy/tuning/search.h"

#include "../memory/parameters.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace weft::strategy {

namespace {

// The memory model predicts no larger batches.
constexpr int64_t kMaxTokens = int64_t{1} << 22;

struct Candidate {
  TrainingSpec training;
  StepTime time;
};

std::vector<int64_t> divisors_of(int64_t number) {
  std::vector<int64_t> divisors;
  for (int64_t each = 1; each <= number; ++each) {
    if (number % each == 0) {
      divisors.push_back(each);
    }
  }
  return divisors;
}

// Returns the fixed size if it is one of the sizes, or all sizes if none is fixed.
std::vector<int64_t> allowed(std::vector<int64_t> sizes, std::optional<int64_t> fixed) {
  if (!fixed) {
    return sizes;
  }
  const bool is_possible = std::find(sizes.begin(), sizes.end(), *fixed) != sizes.end();
  return is_possible ? std::vector<int64_t>{*fixed} : std::vector<int64_t>{};
}

Mesh mesh_of(int64_t replicas, int64_t data, int64_t tensor) {
  std::vector<Axis> axes;
  for (const auto& [name, size] : {std::pair<std::string, int64_t>{"data_replicate", replicas},
                                   {"data_parallel", data},
                                   {"tensor_parallel", tensor}}) {
    if (size > 1) {
      axes.push_back({.name = name, .size = size});
    }
  }
  return Mesh(std::move(axes));
}

// One MLP has no blocks to checkpoint.
std::vector<Checkpointing> kinds_of(const LayoutSearch& search) {
  const bool has_blocks = std::holds_alternative<DecoderModel>(search.training.model);
  return has_blocks ? search.checkpointing : std::vector<Checkpointing>{Checkpointing::kNone};
}

// Adagrad does not step inside the backward.
std::vector<bool> step_options_of(const LayoutSearch& search) {
  std::vector<bool> options = search.steps_in_backward;
  if (search.training.optimizer == OptimizerKind::kAdagrad) {
    std::erase(options, true);
  }
  return options;
}

class Enumeration {
 public:
  explicit Enumeration(const LayoutSearch& search) : search_(search) {
    for (const int64_t tensor : allowed(divisors_of(search.num_devices), search.tensor)) {
      add_meshes(tensor);
    }
    std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
      return a.time.total() < b.time.total();
    });
  }

  std::vector<Candidate> candidates;  // the fastest first
  std::vector<Rejection> rejections;

 private:
  void add_meshes(int64_t tensor) {
    try {
      TrainingSpec training = search_.training;
      training.mesh = mesh_of(1, 1, tensor);
      training.checkpointing = Checkpointing::kNone;
      distinct_ranks(training);
    } catch (const std::invalid_argument& error) {
      rejections.push_back({.tensor = tensor, .reason = error.what()});
      return;
    }
    const int64_t num_data = search_.num_devices / tensor;
    for (const int64_t data : allowed(divisors_of(num_data), search_.data)) {
      const int64_t replicas = num_data / data;
      const bool is_wanted = !search_.replicas || *search_.replicas == replicas;
      if (is_wanted && search_.global_sequences % num_data == 0) {
        add_candidates(mesh_of(replicas, data, tensor), search_.global_sequences / num_data);
      }
    }
  }

  void add_candidates(const Mesh& mesh, int64_t sequences) {
    for (const int64_t micro_batches : allowed(divisors_of(sequences), search_.micro_batches)) {
      if (sequences / micro_batches > kMaxTokens / search_.training.tokens) {
        continue;
      }
      for (const Checkpointing checkpointing : kinds_of(search_)) {
        TrainingSpec training = search_.training;
        training.mesh = mesh;
        training.sequences = sequences / micro_batches;
        training.micro_batches = micro_batches;
        training.checkpointing = checkpointing;
        training.steps_in_backward = false;
        training.steps_by_rows = false;
        const StepTime time = predict_step_time(training, search_.cluster);
        candidates.push_back({.training = std::move(training), .time = time});
      }
    }
  }

  const LayoutSearch& search_;
};

MemoryUsage largest_usage(const TrainingSpec& training) {
  MemoryUsage largest;
  for (const RankClass& each : distinct_ranks(training)) {
    for (const PhaseMemory& phase : predict_memory(training, each.global_rank)) {
      if (phase.at_peak.total() > largest.total()) {
        largest = phase.at_peak;
      }
    }
  }
  return largest;
}

// Returns fewer bytes than the parameters and optimizer states of the rank with the least.
int64_t least_state_bytes(const TrainingSpec& training) {
  TrainingSpec one = training;
  one.mesh = Mesh();
  one.steps_in_backward = true;  // leaves the gradients out
  if (one.optimizer == OptimizerKind::kAdagrad) {
    one.optimizer = OptimizerKind::kSgdMomentum;  // which has one state, too, and may step there
  }
  one.precision =
      training.precision == Precision::kHalfTrue ? training.precision : Precision::k32True;
  one.weights = WeightFormat::kLikePrecision;
  one.checkpointing = Checkpointing::kNone;
  const bool has_other_weights = training.weights != WeightFormat::kLikePrecision;
  const ParameterCost cost = parameter_cost(one);
  const double bytes = static_cast<double>(cost.num_elements) * cost.bytes_per_element;
  // Split weights take 3 or 4 bytes instead of 4, and replicas all hold the same bytes.
  const int64_t num_shards =
      training.mesh.size() /
      (training.mesh.has_axis("data_replicate") ? training.mesh.size("data_replicate") : 1);
  return static_cast<int64_t>(bytes * (has_other_weights ? 0.5 : 1.0)) / num_shards;
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
  if (step_options_of(search).empty()) {
    throw std::invalid_argument(
        "tune: Adagrad does not step inside the backward; use SGD, Adam or AdamW, or step after "
        "it");
  }
}

[[noreturn]] void refuse(const LayoutSearch& search, const std::vector<Rejection>& rejections) {
  if (!rejections.empty()) {
    throw std::invalid_argument("tune: no layout of " + std::to_string(search.num_devices) +
                                " devices is valid: " + rejections.front().reason);
  }
  throw std::invalid_argument(
      "tune: got " + std::to_string(search.num_devices) + " devices and " +
      std::to_string(search.global_sequences) +
      " sequences for a step, which no layout divides with the sizes that are fixed; give a "
      "multiple of the data-parallel ranks, or fix other sizes");
}

}  // namespace

LayoutSearchResult search_layouts(const LayoutSearch& search) {
  check(search);
  Enumeration found(search);
  if (found.candidates.empty()) {
    refuse(search, found.rejections);
  }
  const std::vector<bool> step_options = step_options_of(search);
  LayoutSearchResult result;
  result.rejections = std::move(found.rejections);
  result.num_candidates = static_cast<int64_t>(found.candidates.size());
  for (Candidate& candidate : found.candidates) {
    if (std::cmp_equal(result.layouts.size(), search.max_results)) {
      break;
    }
    const int64_t bound = least_state_bytes(candidate.training);
    const bool may_fit = bound <= search.memory_limit;
    const bool may_be_smallest =
        result.layouts.empty() && (!result.smallest || bound < result.smallest->at_peak.total());
    bool fits = false;
    for (const bool steps_in_backward : step_options) {
      if (fits || !(may_fit || may_be_smallest)) {
        break;
      }
      candidate.training.steps_in_backward = steps_in_backward;
      FoundLayout layout = {.training = candidate.training,
                            .time = candidate.time,
                            .at_peak = largest_usage(candidate.training)};
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

}  // namespace weft::strategy
