#include "parameters.h"

#include "../text.h"
#include "weft/strategy/shard.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace weft::strategy {

namespace {

std::string block_name(int64_t layer) { return "model.layers." + std::to_string(layer); }

constexpr std::array<std::string_view, 4> kProjections = {"q_proj", "k_proj", "v_proj", "o_proj"};
constexpr std::array<std::string_view, 3> kMlpLayers = {"gate_proj", "up_proj", "down_proj"};

std::vector<std::string> names_of(const FeedForwardModel& model) {
  std::vector<std::string> names = {"", "w1", "w2"};
  if (model.is_gated) {
    names.emplace_back("w3");
  }
  return names;
}

std::vector<std::string> names_of(const DecoderModel& model) {
  std::vector<std::string> names = {"", "model", "model.embed_tokens", "model.layers"};
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const std::string block = block_name(layer);
    names.push_back(block);
    names.push_back(block + ".self_attn");
    for (const std::string_view projection : kProjections) {
      names.push_back(block + ".self_attn." + std::string(projection));
    }
    names.push_back(block + ".mlp");
    for (const std::string_view mlp_layer : kMlpLayers) {
      names.push_back(block + ".mlp." + std::string(mlp_layer));
    }
    names.push_back(block + ".input_layernorm");
    names.push_back(block + ".post_attention_layernorm");
  }
  names.emplace_back("model.norm");
  names.emplace_back("lm_head");
  return names;
}

}  // namespace

std::vector<std::string> module_names(const ModelSpec& model) {
  return std::visit([](const auto& value) { return names_of(value); }, model);
}

namespace detail {

namespace {

// Returns the styles that plan="auto" gives a model's modules.
Styles auto_styles(const FeedForwardModel& /*model*/) { return {{"", {Style::kColumnRowMlp}}}; }

Styles auto_styles(const DecoderModel& model) {
  Styles styles;
  styles["model.embed_tokens"] = {Style::kVocabEmbedding};
  styles["lm_head"] = {Style::kColumnGatherOutput};
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const std::string block = block_name(layer);
    for (const std::string_view projection : kProjections) {
      styles[block + ".self_attn." + std::string(projection)] = {
          projection == "o_proj" ? Style::kRow : Style::kColumn};
    }
    styles[block + ".mlp"] = {Style::kColumnRowMlp};
  }
  return styles;
}

// Adds the styles of the layers of the fused MLP `mlp`: column, and row for the last layer.
void add_layers(Styles& styles, const std::string& mlp, const FeedForwardModel& model) {
  const ModuleStyle own = styles.at(mlp);
  styles["w1"] = {.style = Style::kColumn, .recompute = own.recompute, .is_fused = true};
  styles["w2"] = {.style = Style::kRow, .recompute = own.recompute, .is_fused = true};
  if (model.is_gated) {
    styles["w3"] = {.style = Style::kColumn, .recompute = own.recompute, .is_fused = true};
  }
}

void add_layers(Styles& styles, const std::string& mlp, const DecoderModel& /*model*/) {
  const ModuleStyle own = styles.at(mlp);
  for (const std::string_view layer : kMlpLayers) {
    styles[mlp + "." + std::string(layer)] = {
        .style = layer == "down_proj" ? Style::kRow : Style::kColumn,
        .recompute = own.recompute,
        .is_fused = true};
  }
}

bool is_mlp(const std::string& module, const ModelSpec& model) {
  return std::holds_alternative<FeedForwardModel>(model) ? module.empty()
                                                         : module.ends_with(".mlp");
}

// Returns the reason why a module may not get a style; empty if it may.
std::string_view unsupported_reason(const std::string& module,
                                    Style style,
                                    const ModelSpec& model) {
  const auto* decoder = std::get_if<DecoderModel>(&model);
  const bool is_embedding = module == "model.embed_tokens";
  const bool is_linear =
      decoder == nullptr ? !module.empty() : module.ends_with("_proj") || module == "lm_head";
  switch (style) {
    case Style::kColumnRowMlp:
      return is_mlp(module, model) ? "" : "it is no MLP; use column and row rules for its layers";
    case Style::kVocabEmbedding:
      return is_embedding ? "" : "it is no embedding; give the style to 'model.embed_tokens'";
    case Style::kColumn:
    case Style::kRow:
      return is_linear ? "" : "it is no linear layer; name the linear layers themselves";
    case Style::kReplicate:
      return "";
    case Style::kColumnGatherOutput:
      return module == "lm_head" ? ""
                                 : "only 'lm_head' has a prediction for it; leave the rule out";
    case Style::kRowSplitInput:
    case Style::kAttention:
    case Style::kVocabHead:
    case Style::kExperts:
    case Style::kSequenceParallel:
    case Style::kReplicateSumGradients:
    case Style::kIgnore:
      return "there is no prediction for it; leave its rule out for an upper bound";
  }
  return "";
}

// Returns the dim of a weight [out, in] along which a style shards it, if any.
std::optional<std::size_t> shard_dim_of(Style style) {
  switch (style) {
    case Style::kColumn:
    case Style::kColumnGatherOutput:
    case Style::kVocabEmbedding:
      return 0;
    case Style::kRow:
      return 1;
    default:
      return std::nullopt;
  }
}

// Collects a model's parameters, sharded by the styles of their modules.
class Collector {
 public:
  explicit Collector(const Styles& styles) : styles_(styles) {}

  void linear(const std::string& module, int64_t out, int64_t in, bool has_bias, int64_t layer) {
    const Style style = style_of(module);
    add(module, {out, in}, shard_dim_of(style), layer);
    if (has_bias) {
      add(module, {out}, style == Style::kColumn ? shard_dim_of(style) : std::nullopt, layer);
    }
  }

  void add(const std::string& module,
           std::vector<int64_t> shape,
           std::optional<std::size_t> shard_dim,
           int64_t layer) {
    parameters.push_back(
        {.module = module, .shape = std::move(shape), .shard_dim = shard_dim, .layer = layer});
  }

  [[nodiscard]] Style style_of(const std::string& module) const {
    const auto found = styles_.find(module);
    return found == styles_.end() ? Style::kReplicate : found->second.style;
  }

  std::vector<Parameter> parameters;

 private:
  const Styles& styles_;
};

void collect(Collector& collector, const FeedForwardModel& model) {
  collector.linear("w1", model.hidden_dim, model.dim, model.has_bias, 0);
  collector.linear("w2", model.dim, model.hidden_dim, model.has_bias, 0);
  if (model.is_gated) {
    collector.linear("w3", model.hidden_dim, model.dim, model.has_bias, 0);
  }
}

void collect(Collector& collector, const DecoderModel& model) {
  collector.linear("model.embed_tokens", model.vocab_size, model.dim, false, 0);
  const int64_t query_dim = model.num_heads * model.head_dim;
  const int64_t kv_dim = model.num_kv_heads * model.head_dim;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const std::string block = block_name(layer);
    const std::string attention = block + ".self_attn.";
    const bool has_bias = model.has_attention_bias;
    collector.linear(attention + "q_proj", query_dim, model.dim, has_bias, layer + 1);
    collector.linear(attention + "k_proj", kv_dim, model.dim, has_bias, layer + 1);
    collector.linear(attention + "v_proj", kv_dim, model.dim, has_bias, layer + 1);
    collector.linear(attention + "o_proj", model.dim, query_dim, false, layer + 1);
    collector.linear(block + ".mlp.gate_proj", model.hidden_dim, model.dim, false, layer + 1);
    collector.linear(block + ".mlp.up_proj", model.hidden_dim, model.dim, false, layer + 1);
    collector.linear(block + ".mlp.down_proj", model.dim, model.hidden_dim, false, layer + 1);
    collector.add(block + ".input_layernorm", {model.dim}, std::nullopt, layer + 1);
    collector.add(block + ".post_attention_layernorm", {model.dim}, std::nullopt, layer + 1);
  }
  collector.add("model.norm", {model.dim}, std::nullopt, model.num_layers + 1);
  if (!model.is_tied) {
    collector.linear("lm_head", model.vocab_size, model.dim, false, model.num_layers + 1);
  }
}

// Throws unless both layers of a tied weight shard it along the same dim.
void check_tied(const Styles& styles, const ModelSpec& model) {
  const auto* decoder = std::get_if<DecoderModel>(&model);
  const Collector collector(styles);
  const bool is_alike = shard_dim_of(collector.style_of("model.embed_tokens")) ==
                        shard_dim_of(collector.style_of("lm_head"));
  if (decoder != nullptr && decoder->is_tied && !is_alike) {
    throw std::invalid_argument(
        "memory: the plan shards the tied weight of 'model.embed_tokens' and 'lm_head' in two "
        "ways; give them 'vocab_embedding' and 'column_gather_output', or no rules");
  }
}

void check_options(const Assignment& assignment) {
  const Rule& rule = assignment.rule;
  std::string_view option;
  if (rule.recompute && rule.style != Style::kColumnRowMlp) {
    option = "recompute";
  } else if (rule.offload) {
    option = "offload";
  } else if (rule.precision) {
    option = "precision";
  }
  if (!option.empty()) {
    throw std::invalid_argument("memory: the plan gives " + quote_module(assignment.module) +
                                " the option " + quote(option) +
                                ", but there is no prediction for it; leave it out for an estimate "
                                "without it");
  }
}

}  // namespace

Styles resolve_styles(const TrainingSpec& spec) {
  Styles styles;
  if (spec.plan) {
    for (const Assignment& assignment : spec.plan->resolve(module_names(spec.model))) {
      check_options(assignment);
      styles[assignment.module] = {assignment.rule.style, assignment.rule.recompute};
    }
  } else {
    styles = std::visit([](const auto& model) { return auto_styles(model); }, spec.model);
  }
  check_tied(styles, spec.model);
  std::vector<std::string> mlps;
  for (const auto& [module, style] : styles) {
    if (const auto reason = unsupported_reason(module, style.style, spec.model); !reason.empty()) {
      throw std::invalid_argument("memory: the plan gives " + quote_module(module) + " the style " +
                                  quote(to_string(style.style)) + ", but " + std::string(reason));
    }
    if (style.style == Style::kColumnRowMlp) {
      mlps.push_back(module);
    }
  }
  for (const std::string& mlp : mlps) {
    std::visit([&](const auto& model) { add_layers(styles, mlp, model); }, spec.model);
  }
  return styles;
}

std::vector<Parameter> parameters_of(const ModelSpec& model, const Styles& styles) {
  Collector collector(styles);
  std::visit([&](const auto& value) { collect(collector, value); }, model);
  return std::move(collector.parameters);
}

int64_t axis_size(const Mesh& mesh, std::string_view axis) {
  return mesh.has_axis(axis) ? mesh.size(axis) : 1;
}

int64_t coordinate_on(const Mesh& mesh, std::string_view axis, int64_t global_rank) {
  const auto coordinates = mesh.coordinates(global_rank);
  for (std::size_t i = 0; i < coordinates.size(); ++i) {
    if (mesh.axes()[i].name == axis) {
      return coordinates[i];
    }
  }
  return 0;
}

int64_t num_fsdp_shards(const TrainingSpec& spec) {
  return spec.zero_stage >= 2 ? axis_size(spec.mesh, "data_parallel") : 1;
}

int64_t num_averaged_replicas(const TrainingSpec& spec) {
  const int64_t data = axis_size(spec.mesh, "data_parallel");
  return num_fsdp_shards(spec) > 1 ? 1 : data * axis_size(spec.mesh, "data_replicate");
}

int64_t residual_bytes(const TrainingSpec& spec) {
  const bool gathers_in_half = spec.precision == Precision::kHalfMixed && num_fsdp_shards(spec) > 1;
  const bool is_half = spec.precision == Precision::kHalfTrue ||
                       spec.weights != WeightFormat::kLikePrecision || gathers_in_half;
  return is_half ? 2 : 4;
}

std::vector<StageLayers> stages_of(const DecoderModel& model, const TrainingSpec& spec) {
  std::vector<StageLayers> stages = {{.last_block = model.num_layers}};
  if (spec.pipeline) {
    for (const int64_t first : spec.pipeline->first_blocks) {
      stages.back().last_block = first;
      stages.back().has_head = false;
      stages.push_back(
          {.first_block = first, .last_block = model.num_layers, .has_embedding = false});
    }
  }
  return stages;
}

std::vector<int32_t> ranks_of_stages(const TrainingSpec& spec) {
  const int64_t num_ranks = axis_size(spec.mesh, "pipeline_parallel");
  if (!spec.pipeline) {
    return {0};
  }
  const auto num_stages = static_cast<int64_t>(spec.pipeline->first_blocks.size()) + 1;
  return place_stages(spec.pipeline->schedule, num_ranks, num_stages / num_ranks);
}

std::vector<StageLayers> stages_on_rank(const std::vector<StageLayers>& stages,
                                        const TrainingSpec& spec,
                                        int64_t global_rank) {
  const std::vector<int32_t> rank_of = ranks_of_stages(spec);
  const int64_t rank = coordinate_on(spec.mesh, "pipeline_parallel", global_rank);
  std::vector<StageLayers> own;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    if (rank_of[i] == rank) {
      own.push_back(stages[i]);
    }
  }
  return own;
}

std::vector<bool> checkpointed_blocks(const DecoderModel& model, const TrainingSpec& spec) {
  const auto stages = stages_of(model, spec);
  const auto num_ranks = static_cast<std::size_t>(axis_size(spec.mesh, "pipeline_parallel"));
  std::vector<bool> result(static_cast<std::size_t>(model.num_layers), false);
  if (spec.checkpointing == Checkpointing::kNone) {
    return result;
  }
  const int64_t num_of_rank = spec.checkpointed_blocks.value_or(model.num_layers);
  std::vector<int64_t> num_left(num_ranks, num_of_rank);
  const std::vector<int32_t> rank_of = ranks_of_stages(spec);
  for (std::size_t i = 0; i < stages.size(); ++i) {
    int64_t& left = num_left[static_cast<std::size_t>(rank_of[i])];
    for (int64_t block = stages[i].first_block; block < stages[i].last_block && left > 0; --left) {
      result[static_cast<std::size_t>(block++)] = true;
    }
  }
  return result;
}

std::vector<Parameter> parameters_on_rank(std::vector<Parameter> parameters,
                                          const TrainingSpec& spec,
                                          int64_t global_rank) {
  const auto* model = std::get_if<DecoderModel>(&spec.model);
  if (model == nullptr || !spec.pipeline) {
    return parameters;
  }
  const auto stages = stages_on_rank(stages_of(*model, spec), spec, global_rank);
  std::erase_if(parameters, [&](const Parameter& parameter) {
    return std::none_of(stages.begin(), stages.end(), [&](const StageLayers& stage) {
      const bool is_embedding = parameter.layer == 0;
      const bool is_head = parameter.layer > model->num_layers;
      const int64_t block = parameter.layer - 1;
      return is_embedding ? stage.has_embedding || (model->is_tied && stage.has_head)
             : is_head    ? stage.has_head
                          : stage.first_block <= block && block < stage.last_block;
    });
  });
  return parameters;
}

std::vector<int64_t> tensor_parallel_shape(const Parameter& parameter,
                                           int64_t tp_size,
                                           int64_t tp_rank) {
  std::vector<int64_t> shape = parameter.shape;
  if (parameter.shard_dim) {
    int64_t& dim = shape.at(*parameter.shard_dim);
    dim = shard_range(dim, tp_size, tp_rank).length;
  }
  return shape;
}

int64_t num_elements(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t num_buffer_elements(const ModelSpec& model) {
  const auto* decoder = std::get_if<DecoderModel>(&model);
  return decoder == nullptr ? 0 : 2 * decoder->max_tokens * decoder->head_dim;
}

}  // namespace detail
}  // namespace weft::strategy
