// Simulates the phases of a training step, and finds the ranks with different local shapes.

#include "check_training.h"
#include "decoder_part.h"
#include "stage_run.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace weft::strategy {

namespace {

using detail::Buffer;
using detail::RankMemory;
using detail::Rows;

constexpr int64_t kTokenIdBytes = 8;  // int64

// Holds the token ids of a rank's batch, which have one id more than there are tokens.
Buffer decoder_batch(RankMemory& memory, const TrainingSpec& spec) {
  return memory.hold_bytes(MemoryCategory::kSavedActivations,
                           spec.sequences * (spec.tokens + 1) * kTokenIdBytes);
}

// A model's forward, with its loss, and its backward.
class Run {
 public:
  Run() = default;
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  Run(Run&&) = delete;
  Run& operator=(Run&&) = delete;
  virtual ~Run() = default;

  virtual void forward() = 0;
  virtual void backward() = 0;
};

// The loss is the sum of the output.
class FeedForwardRun : public Run {
 public:
  FeedForwardRun(RankMemory& memory, const FeedForwardModel& model, const Rows& rows)
      : memory_(memory),
        mlp_(memory,
             model.is_gated ? std::vector<std::string>{"w1", "w3", "w2"}
                            : std::vector<std::string>{"w1", "w2"}),
        rows_(rows),
        dim_(model.dim),
        batch_(memory.batch(rows.all * model.dim)) {}

  void forward() override {
    memory_.unshard(0);
    mlp_.forward(rows_, memory_.gathers_in_half() ? memory_.saved(rows_.all * dim_) : batch_);
  }

  void backward() override {
    mlp_.backward(rows_, {}, false);
    memory_.reduce_gradients(0);
  }

 private:
  RankMemory& memory_;
  detail::Mlp mlp_;
  Rows rows_;
  int64_t dim_;
  Buffer batch_;
};

class DecoderRun : public Run {
 public:
  DecoderRun(RankMemory& memory, const DecoderModel& model, const TrainingSpec& spec)
      : batch_(decoder_batch(memory, spec)),
        part_(memory, model, detail::stages_of(model, spec).front(), spec, spec.sequences) {}

  void forward() override { part_.forward({}); }
  void backward() override { part_.backward({}); }

 private:
  Buffer batch_;
  detail::DecoderPart part_;
};

std::unique_ptr<Run> make_run(RankMemory& memory, const TrainingSpec& spec) {
  if (const auto* model = std::get_if<FeedForwardModel>(&spec.model)) {
    return std::make_unique<FeedForwardRun>(
        memory, *model, detail::rows_of(spec, spec.sequences, memory.tp_rank()));
  }
  return std::make_unique<DecoderRun>(memory, std::get<DecoderModel>(spec.model), spec);
}

// Returns the distance between neighbouring ranks of an axis; 0 without the axis.
int64_t rank_distance(const Mesh& mesh, std::string_view axis) {
  if (detail::axis_size(mesh, axis) == 1) {
    return 0;
  }
  const std::vector<int64_t> group = mesh.group(axis, 0);
  return group.at(1) - group.at(0);
}

// Simulates forwards and backwards.
void run_step(RankMemory& memory,
              const TrainingSpec& spec,
              int64_t global_rank,
              detail::Timeline& timeline) {
  if (spec.pipeline) {
    const Buffer batch = decoder_batch(memory, spec);
    detail::run_stages(memory, std::get<DecoderModel>(spec.model), spec, global_rank, timeline);
    return;
  }
  if (spec.micro_batches > 1) {
    memory.hold_accumulated_gradients();
  } else if (!spec.steps_in_backward) {
    memory.hold_gradients_of_previous_step();
  }
  const auto run = make_run(memory, spec);
  run->forward();
  memory.forward_ends();
  if (spec.micro_batches == 1) {
    memory.drop_gradients();
  }
  timeline.begin_phase("backward");
  run->backward();
}

// Returns each phase once, in the order of their first appearance, with the largest of its peaks.
std::vector<PhaseMemory> merged(const std::vector<PhaseMemory>& phases) {
  std::vector<PhaseMemory> result;
  for (const PhaseMemory& phase : phases) {
    const auto found = std::find_if(result.begin(), result.end(), [&](const PhaseMemory& each) {
      return each.phase == phase.phase;
    });
    if (found == result.end()) {
      result.push_back(phase);
    } else if (phase.at_peak.total() > found->at_peak.total()) {
      found->at_peak = phase.at_peak;
    }
  }
  return result;
}

// Returns the bytes of a state for each element of a large parameter with `parameter_bytes` each.
double moment_bytes(const TrainingSpec& spec, double parameter_bytes) {
  switch (spec.states) {
    case StateFormat::kLikeParameters:
      return parameter_bytes;
    case StateFormat::kFloat32:
      return 4;
    case StateFormat::kBFloat16:
      return 2;
    case StateFormat::kInt8:
      return 1 + 4.0 / 256;
  }
  return 0;
}

}  // namespace

std::vector<PhaseMemory> predict_memory(const TrainingSpec& spec, int64_t global_rank) {
  detail::check_training(spec);
  detail::Timeline timeline;
  timeline.begin_phase("init");
  RankMemory memory(spec, global_rank, timeline);
  memory.initialize();
  memory.split_weights();
  timeline.begin_phase("forward");
  memory.make_optimizer_state();
  memory.hold_staging_of_previous_step();
  run_step(memory, spec, global_rank, timeline);
  memory.backward_ends();
  timeline.begin_phase("step");
  memory.step();
  return merged(timeline.phases());
}

int64_t offloaded_bytes(const TrainingSpec& spec, int64_t global_rank) {
  detail::check_training(spec);
  detail::Timeline timeline;
  RankMemory memory(spec, global_rank, timeline);
  memory.split_weights();
  return memory.offloaded_bytes();
}

std::vector<RankClass> distinct_ranks(const TrainingSpec& spec) {
  detail::check_training(spec);
  const int64_t tp_size = detail::axis_size(spec.mesh, "tensor_parallel");
  const auto of_model = detail::parameters_of(spec.model, detail::resolve_styles(spec));
  // By the position in the pipeline, the tokens, and the local sizes of all parameters.
  std::map<std::vector<int64_t>, RankClass> classes;
  // Ranks with the same tp_rank hold the same bytes, because FSDP2 pads its shards.
  const int64_t num_positions = detail::axis_size(spec.mesh, "pipeline_parallel");
  for (int64_t position = 0; position < num_positions; ++position) {
    const int64_t first = position * rank_distance(spec.mesh, "pipeline_parallel");
    const auto parameters = detail::parameters_on_rank(of_model, spec, first);
    for (int64_t tp_rank = 0; tp_rank < tp_size; ++tp_rank) {
      std::vector<int64_t> sizes = {position, detail::rows_of(spec, 1, tp_rank).own};
      for (const auto& parameter : parameters) {
        sizes.push_back(
            detail::num_elements(detail::tensor_parallel_shape(parameter, tp_size, tp_rank)));
      }
      const int64_t rank = first + tp_rank * rank_distance(spec.mesh, "tensor_parallel");
      const RankClass rank_class{.global_rank = rank, .num_ranks = 0};
      classes.try_emplace(sizes, rank_class).first->second.num_ranks +=
          spec.mesh.size() / tp_size / num_positions;
    }
  }
  std::vector<RankClass> result;
  result.reserve(classes.size());
  for (const auto& [sizes, rank_class] : classes) {
    result.push_back(rank_class);
  }
  std::sort(result.begin(), result.end(), [](const RankClass& a, const RankClass& b) {
    return a.global_rank < b.global_rank;
  });
  return result;
}

ParameterCost parameter_cost(const TrainingSpec& spec) {
  detail::check_training(spec);
  ParameterCost cost;
  for (const auto& parameter : detail::parameters_of(spec.model, {})) {
    cost.num_elements += detail::num_elements(parameter.shape);
  }
  const bool is_split = spec.weights != WeightFormat::kLikePrecision;
  const double size = is_split || spec.precision == Precision::kHalfTrue ? 2 : 4;
  const double low_bits = !is_split ? 0 : spec.weights == WeightFormat::kSplit ? 2 : 1;
  // Autocast's copies of the weights, which the layers save for the backward.
  const bool is_gathered_in_half =
      spec.precision == Precision::kHalfMixed && detail::num_fsdp_shards(spec) > 1;
  const bool is_mixed =
      spec.precision == Precision::kHalfMixed || spec.precision == Precision::kAutocast;
  const bool has_copies =
      is_mixed && !is_gathered_in_half && !is_split && spec.checkpointing == Checkpointing::kNone;
  const double copies = has_copies ? 2 : 0;
  const double gradient = spec.steps_in_backward ? 0 : size;
  const auto num_moments = static_cast<double>(detail::num_moments(spec.optimizer));
  const double states =
      spec.offloads_states ? 0 : low_bits + num_moments * moment_bytes(spec, size);
  cost.bytes_per_element = size + gradient + states + copies;
  return cost;
}

}  // namespace weft::strategy
