#include "candidates.h"

#include "../memory/parameters.h"
#include "variants.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

namespace weft::strategy::detail {

namespace {

// The memory model predicts no larger batches.
constexpr int64_t kMaxTokens = int64_t{1} << 22;

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

Mesh mesh_of(int64_t pipeline, int64_t replicas, int64_t data, int64_t tensor) {
  std::vector<Axis> axes;
  for (const auto& [name, size] : {std::pair<std::string, int64_t>{"pipeline_parallel", pipeline},
                                   {"data_replicate", replicas},
                                   {"data_parallel", data},
                                   {"tensor_parallel", tensor}}) {
    if (size > 1) {
      axes.push_back({.name = name, .size = size});
    }
  }
  return Mesh(std::move(axes));
}

// One MLP has no blocks to checkpoint. A selective checkpoint excludes rules with `recompute`.
std::vector<Checkpointing> kinds_of(const LayoutSearch& search) {
  if (!std::holds_alternative<DecoderModel>(search.training.model)) {
    return {Checkpointing::kNone};
  }
  std::vector<Checkpointing> kinds = search.checkpointing;
  const Styles styles = resolve_styles(search.training);
  const bool recomputes = std::any_of(
      styles.begin(), styles.end(), [](const auto& each) { return each.second.recompute; });
  if (recomputes && kinds.size() > 1) {
    std::erase(kinds, Checkpointing::kSelective);
  }
  return kinds;
}

// Whether checkpoints of some blocks are tried.
bool divides_blocks(const LayoutSearch& search, const std::vector<Checkpointing>& kinds) {
  const auto has = [&](Checkpointing kind) {
    return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
  };
  return search.divides_blocks && has(Checkpointing::kNone) && has(Checkpointing::kFull) &&
         !search.training.checkpointed_blocks;
}

class Enumeration {
 public:
  explicit Enumeration(const LayoutSearch& search) : cache(search.cluster), search_(search) {
    const auto* decoder = std::get_if<DecoderModel>(&search.training.model);
    const int64_t num_blocks = decoder == nullptr ? 1 : decoder->num_layers;
    for (const int64_t tensor : allowed(divisors_of(search.num_devices), search.tensor)) {
      if (!is_valid(tensor)) {
        continue;
      }
      has_valid_tensor_size = true;
      sequence_parallel_ = sequence_options(tensor);
      for (const int64_t pipeline :
           allowed(divisors_of(search.num_devices / tensor), search.pipeline)) {
        if (pipeline <= num_blocks) {
          add_meshes(pipeline, tensor);
        }
      }
    }
  }

  std::vector<Candidate> candidates;
  std::vector<Rejection> rejections;
  bool has_valid_tensor_size = false;
  WorkCache cache;

 private:
  bool is_valid(int64_t tensor) {
    const bool is_sharded = tensor > 1 && search_.sequence_parallel == std::vector<bool>{true};
    const std::optional<std::string> reason = rejection_of(tensor, is_sharded);
    if (reason) {
      rejections.push_back({.tensor = tensor, .reason = *reason});
    }
    return !reason;
  }

  // Returns why a tensor-parallel size is not possible; nullopt if it is.
  [[nodiscard]] std::optional<std::string> rejection_of(int64_t tensor,
                                                        bool sequence_parallel) const {
    try {
      TrainingSpec training = search_.training;
      training.mesh = mesh_of(1, 1, 1, tensor);
      training.pipeline = {};
      training.zero_stage = 3;
      training.offloads_states = false;
      training.sequence_parallel = sequence_parallel;
      training.checkpointing = Checkpointing::kNone;
      training.checkpointed_blocks = {};
      distinct_ranks(training);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return std::nullopt;
  }

  // Returns the values of sequence_parallel that are possible for a tensor-parallel size.
  [[nodiscard]] std::vector<bool> sequence_options(int64_t tensor) const {
    if (tensor == 1) {
      return {false};
    }
    std::vector<bool> options = search_.sequence_parallel;
    if (options.size() > 1 && rejection_of(tensor, true)) {
      std::erase(options, true);
    }
    return options;
  }

  void add_meshes(int64_t pipeline, int64_t tensor) {
    const int64_t num_data = search_.num_devices / tensor / pipeline;
    for (const int64_t data : allowed(divisors_of(num_data), search_.data)) {
      const int64_t replicas = num_data / data;
      const bool is_wanted =
          search_.replicas ? *search_.replicas == replicas : pipeline == 1 || replicas == 1;
      if (!is_wanted || search_.global_sequences % num_data != 0) {
        continue;
      }
      for (const int64_t zero_stage : zero_stages_of(pipeline, data)) {
        TrainingSpec training = search_.training;
        training.mesh = mesh_of(pipeline, replicas, data, tensor);
        training.zero_stage = zero_stage;
        training.steps_in_backward = false;
        training.steps_by_rows = false;
        training.offloads_states = false;
        training.pipeline = {};
        const int64_t sequences = search_.global_sequences / num_data;
        if (pipeline == 1) {
          add_accumulating(training, sequences);
        } else {
          add_pipelines(training, sequences);
        }
      }
    }
  }

  // Without data-parallel ranks, all stages are the same.
  [[nodiscard]] std::vector<int64_t> zero_stages_of(int64_t pipeline, int64_t data) const {
    std::vector<int64_t> stages = search_.zero_stages;
    const auto has = [&](int64_t stage) {
      return std::find(stages.begin(), stages.end(), stage) != stages.end();
    };
    if (data == 1) {
      return {has(3) ? 3 : stages.front()};
    }
    if (pipeline > 1 && has(3)) {
      std::erase(stages, 2);
    }
    const TrainingSpec& training = search_.training;
    const bool is_low_precision = training.states != StateFormat::kLikeParameters ||
                                  training.weights != WeightFormat::kLikePrecision;
    const bool always_steps_in_backward = step_options_of(search_) == std::vector<bool>{true};
    const bool always_offloads = offload_options_ == std::vector<bool>{true};
    if (is_low_precision || always_steps_in_backward || always_offloads) {
      std::erase(stages, 1);
    }
    return stages;
  }

  void add_accumulating(TrainingSpec& training, int64_t sequences) {
    for (const int64_t micro_batches : allowed(divisors_of(sequences), search_.micro_batches)) {
      training.sequences = sequences / micro_batches;
      training.micro_batches = micro_batches;
      if (training.sequences > kMaxTokens / training.tokens) {
        continue;
      }
      for (const bool sequence_parallel : sequence_parallel_) {
        training.sequence_parallel = sequence_parallel;
        for (const Checkpointing checkpointing : kinds_) {
          training.checkpointing = checkpointing;
          add(training);
        }
      }
    }
  }

  void add_pipelines(TrainingSpec& training, int64_t sequences) {
    const auto& model = std::get<DecoderModel>(training.model);
    const bool accumulates = search_.micro_batches && *search_.micro_batches > 1;
    if (accumulates || sequences > kMaxTokens / training.tokens) {
      return;
    }
    training.micro_batches = 1;
    for (const auto& [schedule, stages_per_rank] : search_.schedules) {
      const int64_t num_stages = training.mesh.size("pipeline_parallel") * stages_per_rank;
      if (num_stages > model.num_layers) {
        continue;
      }
      for (const int64_t micro_batches : divisors_of(sequences)) {
        for (const bool sequence_parallel : sequence_parallel_) {
          training.sequence_parallel = sequence_parallel;
          for (const Checkpointing checkpointing : kinds_) {
            training.checkpointing = checkpointing;
            training.sequences = sequences / micro_batches;
            training.pipeline = {};
            training.pipeline = {.first_blocks = stages_of(training, num_stages),
                                 .schedule = schedule,
                                 .micro_batches = micro_batches};
            training.sequences = sequences;
            add(training);
          }
        }
      }
    }
    training.pipeline = {};
  }

  // Returns even_stages() of a training of one micro-batch. They do not depend on the other axes.
  std::vector<int64_t> stages_of(TrainingSpec training, int64_t num_stages) {
    const int64_t tensor = axis_size(training.mesh, "tensor_parallel");
    const auto [found, is_new] = stages_.try_emplace(std::tuple(tensor,
                                                                training.sequences,
                                                                training.sequence_parallel,
                                                                training.checkpointing,
                                                                num_stages));
    if (is_new) {
      training.mesh = mesh_of(1, 1, 1, tensor);
      training.checkpointed_blocks = {};  // of each rank, so that all blocks count alike
      found->second = detail::even_stages(training, cache, num_stages);
    }
    return found->second;
  }

  // Throws for options of the search that exclude each other. Checks each combination once, because
  // the sizes of the other axes do not matter.
  void check(const TrainingSpec& training) {
    if (checked_
            .emplace(axis_size(training.mesh, "tensor_parallel"),
                     training.zero_stage,
                     training.checkpointing)
            .second) {
      distinct_ranks(training);
    }
  }

  void add(TrainingSpec training) {
    if (training.checkpointing == Checkpointing::kNone) {
      training.checkpointed_blocks = {};
    }
    check(training);
    add_candidate(training, false);
    if (training.checkpointing == Checkpointing::kFull && divides_blocks_ &&
        most_blocks(training) > 1) {
      training.checkpointed_blocks = 1;
      add_candidate(training, true);
    }
  }

  void add_candidate(const TrainingSpec& training, bool has_open_blocks) {
    Candidate candidate = {.training = training,
                           .offloads_states = offload_options_of(search_, training),
                           .steps_in_backward = step_options_of(search_, training),
                           .has_open_blocks = has_open_blocks};
    predict_times(candidate, cache, false);
    candidates.push_back(std::move(candidate));
  }

  // By tensor-parallel ranks, sequences, sequence parallelism, checkpointing and stages.
  std::map<std::tuple<int64_t, int64_t, bool, Checkpointing, int64_t>, std::vector<int64_t>>
      stages_;
  // Tensor-parallel ranks, ZeRO stages and kinds of checkpoints.
  std::set<std::tuple<int64_t, int64_t, Checkpointing>> checked_;
  std::vector<bool> sequence_parallel_;  // those of the current tensor-parallel size
  const LayoutSearch& search_;
  std::vector<Checkpointing> kinds_ = kinds_of(search_);
  bool divides_blocks_ = divides_blocks(search_, kinds_);
  std::vector<bool> offload_options_ = offload_options_of(search_);
};

}  // namespace

Candidates candidates_of(const LayoutSearch& search) {
  Enumeration found(search);
  return {.candidates = std::move(found.candidates),
          .rejections = std::move(found.rejections),
          .has_valid_tensor_size = found.has_valid_tensor_size,
          .cache = std::move(found.cache)};
}

int64_t most_blocks(const TrainingSpec& training) {
  const auto& model = std::get<DecoderModel>(training.model);
  const auto stages = stages_of(model, training);
  const auto num_ranks = static_cast<std::size_t>(axis_size(training.mesh, "pipeline_parallel"));
  std::vector<int64_t> blocks(num_ranks, 0);
  const auto rank_of = ranks_of_stages(training);
  for (std::size_t i = 0; i < stages.size(); ++i) {
    blocks[static_cast<std::size_t>(rank_of[i])] += stages[i].last_block - stages[i].first_block;
  }
  return *std::max_element(blocks.begin(), blocks.end());
}

}  // namespace weft::strategy::detail
