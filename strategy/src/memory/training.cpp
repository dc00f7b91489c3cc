// Simulates the phases of a training step, and finds the ranks with different local shapes.

#include "../text.h"
#include "layers.h"
#include "weft/strategy/shard.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace weft::strategy {

namespace {

using detail::Buffer;
using detail::RankMemory;

constexpr int64_t kTokenIdBytes = 8;  // int64

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
  FeedForwardRun(RankMemory& memory, const FeedForwardModel& model, int64_t rows)
      : memory_(memory),
        mlp_(memory,
             model.is_gated ? std::vector<std::string>{"w1", "w3", "w2"}
                            : std::vector<std::string>{"w1", "w2"}),
        rows_(rows),
        dim_(model.dim),
        batch_(memory.batch(rows * model.dim)) {}

  void forward() override {
    memory_.unshard(0);
    mlp_.forward(rows_, memory_.gathers_in_half() ? memory_.saved(rows_ * dim_) : batch_);
  }

  void backward() override {
    mlp_.backward(rows_, {}, false);
    memory_.reduce_gradients(0);
  }

 private:
  RankMemory& memory_;
  detail::Mlp mlp_;
  int64_t rows_;
  int64_t dim_;
  Buffer batch_;
};

// The loss is the cross-entropy of the next tokens.
class DecoderRun : public Run {
 public:
  DecoderRun(RankMemory& memory, const DecoderModel& model, const TrainingSpec& spec)
      : memory_(memory),
        model_(model),
        norm_(memory, "model.norm", model.dim),
        rows_(spec.sequences * spec.tokens),
        batch_(memory.hold_bytes(MemoryCategory::kSavedActivations,
                                 spec.sequences * (spec.tokens + 1) * kTokenIdBytes)) {
    for (int64_t layer = 0; layer < model.num_layers; ++layer) {
      blocks_.emplace_back(memory, model, layer, spec.checkpointing);
    }
    const Style embedding = memory.style("model.embed_tokens").style;
    own_vocabulary_ = memory.weight_dim_size(model.is_tied ? "model.embed_tokens" : "lm_head", 0);
    gathers_logits_ = memory.style("lm_head").style == Style::kColumnGatherOutput &&
                      own_vocabulary_ < model.vocab_size;
    vocabulary_ = gathers_logits_ ? model.vocab_size : own_vocabulary_;
    has_embedding_sum_ = embedding == Style::kVocabEmbedding;
  }

  void forward() override {
    memory_.unshard(0);
    Buffer x = memory_.saved_wide(rows_ * model_.dim);
    if (has_embedding_sum_) {
      memory_.communicate(memory_.wide_bytes(rows_ * model_.dim));
    }
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const int64_t unit = static_cast<int64_t>(i) + 1;
      memory_.unshard(unit);
      x = blocks_[i].forward(rows_, x);
      if (i + 1 < blocks_.size()) {
        memory_.reshard(unit);  // the backward begins with the last unit
      }
    }
    const Buffer normed = norm_.forward(rows_, x);
    x.reset();
    head_copies_ = memory_.saved_weight_copies(head());
    normed_ = memory_.saved_input(rows_ * model_.dim, normed);
    const Buffer logits = logits_forward();
    targets_ = memory_.hold_bytes(MemoryCategory::kSavedActivations, rows_ * kTokenIdBytes);
    const Buffer cast = memory_.casts_loss() ? loss_sized() : Buffer();
    log_probabilities_ = memory_.casts_loss() ? memory_.saved_float32(rows_ * vocabulary_)
                                              : memory_.saved(rows_ * vocabulary_);
  }

  void backward() override {
    Buffer grad_logits;
    {
      const Buffer grad = loss_sized();
      targets_.reset();
      grad_logits = loss_sized();
    }
    log_probabilities_.reset();
    if (memory_.casts_loss()) {
      grad_logits = memory_.scratch(rows_ * vocabulary_);
    }
    if (gathers_logits_) {
      grad_logits = memory_.scratch(rows_ * own_vocabulary_);
    }
    Buffer tied_gradient;
    Buffer grad = memory_.scratch(rows_ * model_.dim);
    if (gathers_logits_) {
      memory_.communicate(memory_.product_bytes(rows_ * model_.dim));
    }
    {
      const Buffer products = memory_.gradient_products(head());
      if (memory_.is_autocast()) {  // autograd frees them before it casts the products
        grad_logits.reset();
        normed_.reset();
        head_copies_.reset();
        grad = memory_.scratch_float32(rows_ * model_.dim);
      }
      if (model_.is_tied) {
        tied_gradient = memory_.weight_sized("model.embed_tokens");
      } else {
        memory_.make_gradients("lm_head");
      }
    }
    grad_logits.reset();
    normed_.reset();
    grad = norm_.backward(rows_, std::move(grad));
    for (std::size_t i = blocks_.size(); i-- > 0;) {
      const int64_t unit = static_cast<int64_t>(i) + 1;
      memory_.unshard(unit);
      if (i > 0 && memory_.prefetches()) {
        memory_.unshard(unit - 1);
      }
      grad = blocks_[i].backward(rows_, grad);
      memory_.reduce_gradients(unit);
    }
    memory_.make_gradients("model.embed_tokens");
    tied_gradient.reset();
    memory_.reduce_gradients(0);
  }

 private:
  [[nodiscard]] const char* head() const {
    return model_.is_tied ? "model.embed_tokens" : "lm_head";
  }

  // The cross-entropy computes in float32, on a copy of logits in half precision.
  Buffer loss_sized() {
    return memory_.casts_loss() ? memory_.scratch_float32(rows_ * vocabulary_)
                                : memory_.scratch(rows_ * vocabulary_);
  }

  // The all-gather orders logits by rank; a copy then orders them by class.
  Buffer logits_forward() {
    Buffer logits_shard = memory_.scratch(rows_ * own_vocabulary_);
    if (!gathers_logits_) {
      return logits_shard;
    }
    memory_.communicate_once(memory_.product_bytes(rows_ * own_vocabulary_));
    const Buffer by_rank = memory_.scratch(rows_ * vocabulary_);
    return memory_.scratch(rows_ * vocabulary_);
  }

  RankMemory& memory_;
  DecoderModel model_;
  std::vector<detail::Block> blocks_;
  detail::RmsNorm norm_;
  int64_t rows_;
  int64_t vocabulary_ = 0;      // the number of logits of a token in this rank's loss
  int64_t own_vocabulary_ = 0;  // the number of logits of a token that this rank computes
  bool has_embedding_sum_ = false;
  bool gathers_logits_ = false;
  Buffer batch_, normed_, head_copies_, log_probabilities_, targets_;
};

std::unique_ptr<Run> make_run(RankMemory& memory, const TrainingSpec& spec) {
  if (const auto* model = std::get_if<FeedForwardModel>(&spec.model)) {
    return std::make_unique<FeedForwardRun>(memory, *model, spec.sequences * spec.tokens);
  }
  return std::make_unique<DecoderRun>(memory, std::get<DecoderModel>(spec.model), spec);
}

// With sizes up to these limits, no sum of bytes overflows.
constexpr int64_t kMaxSize = int64_t{1} << 22;
constexpr int64_t kMaxLayers = int64_t{1} << 12;

void check_sizes(std::span<const std::pair<std::string_view, int64_t>> sizes) {
  for (const auto& [name, size] : sizes) {
    const int64_t most = name == "num_layers" ? kMaxLayers : kMaxSize;
    if (size < 1 || size > most) {
      throw std::invalid_argument("memory: got " + std::string(name) + " = " +
                                  std::to_string(size) + "; give a number from 1 to " +
                                  std::to_string(most));
    }
  }
}

void check_model(const FeedForwardModel& model, const TrainingSpec& spec) {
  using Size = std::pair<std::string_view, int64_t>;
  check_sizes(std::vector<Size>{{"dim", model.dim}, {"hidden_dim", model.hidden_dim}});
  if (spec.checkpointing != Checkpointing::kNone) {
    throw std::invalid_argument(
        "memory: one MLP has no blocks to checkpoint; leave checkpointing out, or set recompute "
        "in the plan's rule");
  }
}

void check_model(const DecoderModel& model, const TrainingSpec& spec) {
  using Size = std::pair<std::string_view, int64_t>;
  check_sizes(std::vector<Size>{{"dim", model.dim},
                                {"hidden_dim", model.hidden_dim},
                                {"num_layers", model.num_layers},
                                {"num_heads", model.num_heads},
                                {"num_kv_heads", model.num_kv_heads},
                                {"head_dim", model.head_dim},
                                {"vocab_size", model.vocab_size}});
  const int64_t tp_size = detail::axis_size(spec.mesh, "tensor_parallel");
  for (const auto& [module, style] : detail::resolve_styles(spec)) {
    const bool is_query = module.ends_with("q_proj");
    if (style.style == Style::kColumn && is_query) {
      check_heads(module, "num_heads", model.num_heads, tp_size);
    } else if (style.style == Style::kColumn &&
               (module.ends_with("k_proj") || module.ends_with("v_proj"))) {
      check_heads(module, "num_kv_heads", model.num_kv_heads, tp_size);
    }
  }
}

void check_steps_by_rows(const TrainingSpec& spec) {
  if (spec.micro_batches > 1) {
    throw std::invalid_argument(
        "memory: got steps by rows and " + std::to_string(spec.micro_batches) +
        " micro-batches, whose full gradients are accumulated; use one micro-batch, or step full "
        "weights");
  }
  for (const std::string_view axis : {"data_parallel", "data_replicate"}) {
    if (detail::axis_size(spec.mesh, axis) > 1) {
      throw std::invalid_argument("memory: the mesh '" + spec.mesh.to_string() +
                                  "' has data-parallel ranks, over which full gradients are "
                                  "averaged; use tensor-parallel ranks only to step by rows");
    }
  }
  const auto styles = detail::resolve_styles(spec);
  const bool has_fused = std::any_of(
      styles.begin(), styles.end(), [](const auto& each) { return each.second.is_fused; });
  if (!has_fused) {
    throw std::invalid_argument(
        "memory: there is no fused MLP whose weights could be stepped by rows; give one the style "
        "'column_row_mlp' in the plan, or step full weights");
  }
}

void check_formats(const TrainingSpec& spec) {
  const bool has_usual_weights = spec.weights == WeightFormat::kLikePrecision;
  if (has_usual_weights && spec.states == StateFormat::kLikeParameters) {
    return;
  }
  if (spec.optimizer == OptimizerKind::kSgd || spec.optimizer == OptimizerKind::kAdagrad) {
    throw std::invalid_argument(
        "memory: SGD without momentum and Adagrad have no low-precision states; use Adam, AdamW or "
        "SGD with momentum, or float32 for states and weights");
  }
  if (!has_usual_weights && spec.precision == Precision::k32True) {
    throw std::invalid_argument(
        "memory: weights are split only with half precision; use precision bf16-mixed or "
        "bf16-true");
  }
}

void check(const TrainingSpec& spec) {
  for (const std::string_view axis : {"pipeline_parallel", "context_parallel"}) {
    if (detail::axis_size(spec.mesh, axis) > 1) {
      throw std::invalid_argument("memory: the mesh '" + spec.mesh.to_string() +
                                  "' has the axis '" + std::string(axis) +
                                  "', for which there is no prediction; use data_replicate, "
                                  "data_parallel and tensor_parallel");
    }
  }
  using Size = std::pair<std::string_view, int64_t>;
  check_sizes(std::vector<Size>{{"sequences", spec.sequences},
                                {"tokens", spec.tokens},
                                {"micro_batches", spec.micro_batches}});
  check_sizes(std::vector<Size>{{"sequences * tokens", spec.sequences * spec.tokens}});
  if (spec.steps_in_backward && spec.optimizer == OptimizerKind::kAdagrad) {
    throw std::invalid_argument(
        "memory: Adagrad does not step inside the backward; use SGD, Adam or AdamW, or step after "
        "it");
  }
  check_formats(spec);
  if (spec.steps_by_rows) {
    check_steps_by_rows(spec);
  }
  if (spec.checkpointing == Checkpointing::kSelective) {
    for (const auto& [module, style] : detail::resolve_styles(spec)) {
      if (style.recompute) {
        throw std::invalid_argument(
            "memory: a selective checkpoint would keep activations that the rule of " +
            detail::quote_module(module) + " recomputes; leave out one of the two");
      }
    }
  }
  std::visit([&](const auto& model) { check_model(model, spec); }, spec.model);
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
  check(spec);
  detail::Timeline timeline;
  timeline.begin_phase("init");
  RankMemory memory(spec, global_rank, timeline);
  memory.initialize();
  memory.split_weights();
  timeline.begin_phase("forward");
  memory.make_optimizer_state();
  if (spec.micro_batches > 1) {
    memory.hold_accumulated_gradients();
  } else if (!spec.steps_in_backward) {
    memory.hold_gradients_of_previous_step();
  }
  memory.hold_staging_of_previous_step();
  const auto run = make_run(memory, spec);
  run->forward();
  memory.forward_ends();
  if (spec.micro_batches == 1) {
    memory.drop_gradients();
  }
  timeline.begin_phase("backward");
  run->backward();
  memory.backward_ends();
  timeline.begin_phase("step");
  memory.step();
  return timeline.phases();
}

std::vector<RankClass> distinct_ranks(const TrainingSpec& spec) {
  check(spec);
  const int64_t tp_size = detail::axis_size(spec.mesh, "tensor_parallel");
  const auto parameters = detail::parameters_of(spec.model, detail::resolve_styles(spec));
  std::map<std::vector<int64_t>, RankClass> classes;  // by the local sizes of all parameters
  // Ranks with the same tp_rank hold the same bytes, because FSDP2 pads its shards.
  const std::vector<int64_t> group = spec.mesh.has_axis("tensor_parallel")
                                         ? spec.mesh.group("tensor_parallel", 0)
                                         : std::vector<int64_t>{0};
  for (int64_t tp_rank = 0; tp_rank < tp_size; ++tp_rank) {
    std::vector<int64_t> sizes;
    sizes.reserve(parameters.size());
    for (const auto& parameter : parameters) {
      sizes.push_back(
          detail::num_elements(detail::tensor_parallel_shape(parameter, tp_size, tp_rank)));
    }
    const RankClass rank_class{.global_rank = group.at(static_cast<std::size_t>(tp_rank)),
                               .num_ranks = 0};
    classes.try_emplace(sizes, rank_class).first->second.num_ranks += spec.mesh.size() / tp_size;
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
  check(spec);
  ParameterCost cost;
  for (const auto& parameter : detail::parameters_of(spec.model, {})) {
    cost.num_elements += detail::num_elements(parameter.shape);
  }
  const bool is_split = spec.weights != WeightFormat::kLikePrecision;
  const double size = is_split || spec.precision == Precision::kHalfTrue ? 2 : 4;
  const double low_bits = !is_split ? 0 : spec.weights == WeightFormat::kSplit ? 2 : 1;
  // Autocast's copies of the weights, which the layers save for the backward.
  const bool is_gathered_in_half =
      spec.precision == Precision::kHalfMixed && detail::axis_size(spec.mesh, "data_parallel") > 1;
  const bool is_mixed =
      spec.precision == Precision::kHalfMixed || spec.precision == Precision::kAutocast;
  const bool has_copies =
      is_mixed && !is_gathered_in_half && !is_split && spec.checkpointing == Checkpointing::kNone;
  const double copies = has_copies ? 2 : 0;
  const double gradient = spec.steps_in_backward ? 0 : size;
  const auto num_moments = static_cast<double>(detail::num_moments(spec.optimizer));
  cost.bytes_per_element =
      size + low_bits + gradient + num_moments * moment_bytes(spec, size) + copies;
  return cost;
}

}  // namespace weft::strategy
