#include "check_training.h"

#include "../text.h"
#include "parameters.h"
#include "weft/strategy/shard.h"

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace weft::strategy::detail {

namespace {

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
  const int64_t tp_size = axis_size(spec.mesh, "tensor_parallel");
  for (const auto& [module, style] : resolve_styles(spec)) {
    const bool is_query = module.ends_with("q_proj");
    if (style.style == Style::kColumn && is_query) {
      check_heads(module, "num_heads", model.num_heads, tp_size);
    } else if (style.style == Style::kColumn &&
               (module.ends_with("k_proj") || module.ends_with("v_proj"))) {
      check_heads(module, "num_kv_heads", model.num_kv_heads, tp_size);
    }
  }
}

// Throws unless the plan shards all layers with matrix products in each block: other ones would
// compute on a shard of the tokens, with other temporaries.
void check_sequence_parallel(const TrainingSpec& spec) {
  if (!spec.sequence_parallel || axis_size(spec.mesh, "tensor_parallel") == 1) {
    return;
  }
  const auto* model = std::get_if<DecoderModel>(&spec.model);
  if (model == nullptr) {
    throw std::invalid_argument(
        "memory: got sequence parallelism for one MLP, which has no blocks between which tokens "
        "are sharded; leave it out");
  }
  if (!spec.plan) {
    return;  // "auto" shards them
  }
  const Styles styles = resolve_styles(spec);
  for (int64_t layer = 0; layer < model->num_layers; ++layer) {
    for (const std::string_view name : {"self_attn.q_proj",
                                        "self_attn.k_proj",
                                        "self_attn.v_proj",
                                        "self_attn.o_proj",
                                        "mlp.gate_proj",
                                        "mlp.up_proj",
                                        "mlp.down_proj"}) {
      const Style wanted =
          name.ends_with("o_proj") || name.ends_with("down_proj") ? Style::kRow : Style::kColumn;
      const std::string module = "model.layers." + std::to_string(layer) + "." + std::string(name);
      const auto found = styles.find(module);
      if (found == styles.end() || found->second.style != wanted) {
        throw std::invalid_argument(
            "memory: with sequence parallelism, there is a prediction only for blocks whose "
            "attention and MLP are sharded by column and row rules, but the plan gives " +
            quote_module(module) + " the style " +
            quote(to_string(found == styles.end() ? Style::kReplicate : found->second.style)) +
            "; give it the style " + quote(to_string(wanted)) +
            ", or leave sequence parallelism out");
      }
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
    if (axis_size(spec.mesh, axis) > 1) {
      throw std::invalid_argument("memory: the mesh '" + spec.mesh.to_string() +
                                  "' has data-parallel ranks, over which full gradients are "
                                  "averaged; use tensor-parallel ranks only to step by rows");
    }
  }
  const auto styles = resolve_styles(spec);
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

void check_zero_stage(const TrainingSpec& spec) {
  if (spec.zero_stage < 0 || spec.zero_stage > 3) {
    throw std::invalid_argument("memory: got zero_stage = " + std::to_string(spec.zero_stage) +
                                "; use 0, 1, 2 or 3");
  }
  if (spec.zero_stage != 1 || axis_size(spec.mesh, "data_parallel") == 1) {
    return;
  }
  if (spec.steps_in_backward) {
    throw std::invalid_argument(
        "memory: got steps in the backward and zero_stage = 1, which steps shards of parameters "
        "after the backward; use one of the two");
  }
  if (spec.offloads_states) {
    throw std::invalid_argument(
        "memory: got offloaded optimizer states and zero_stage = 1, which shards states in memory; "
        "use zero_stage 0, 2 or 3, or leave offload out");
  }
  if (spec.states != StateFormat::kLikeParameters || spec.weights != WeightFormat::kLikePrecision) {
    throw std::invalid_argument(
        "memory: got low-precision states or weights and zero_stage = 1, which shards states in "
        "other units than blocks; use zero_stage 0, 2 or 3");
  }
}

void check_checkpointed_blocks(const TrainingSpec& spec) {
  if (!spec.checkpointed_blocks) {
    return;
  }
  const auto* model = std::get_if<DecoderModel>(&spec.model);
  const int64_t most = model == nullptr ? 0 : model->num_layers;
  if (*spec.checkpointed_blocks < 1 || *spec.checkpointed_blocks > most ||
      spec.checkpointing == Checkpointing::kNone) {
    throw std::invalid_argument("memory: got checkpoints of the first " +
                                std::to_string(*spec.checkpointed_blocks) + " of " +
                                std::to_string(most) +
                                " blocks; give a number from 1 to that of the blocks, with full or "
                                "selective checkpoints");
  }
}

void check_pipeline(const TrainingSpec& spec) {
  const int64_t num_ranks = axis_size(spec.mesh, "pipeline_parallel");
  if (num_ranks == 1 && !spec.pipeline) {
    return;
  }
  if (num_ranks == 1 || !spec.pipeline) {
    throw std::invalid_argument("memory: got the mesh '" + spec.mesh.to_string() + "' " +
                                (spec.pipeline ? "and stages" : "without stages") +
                                "; give both the axis pipeline_parallel and the first blocks of "
                                "stages, or none");
  }
  const auto* model = std::get_if<DecoderModel>(&spec.model);
  if (model == nullptr) {
    throw std::invalid_argument(
        "memory: one MLP cannot be divided into stages; leave the pipeline out");
  }
  if (spec.steps_by_rows || spec.micro_batches > 1) {
    throw std::invalid_argument(
        "memory: there is no prediction for pipelines with steps by rows, or with batches whose "
        "gradients are accumulated; use more micro-batches, or leave the pipeline out");
  }
  const PipelineSpec& pipeline = *spec.pipeline;
  const auto num_stages = static_cast<int64_t>(pipeline.first_blocks.size()) + 1;
  if (num_stages % num_ranks != 0) {
    throw std::invalid_argument("memory: got " + std::to_string(num_stages) + " stages for " +
                                std::to_string(num_ranks) +
                                " pipeline ranks; give as many, or a multiple");
  }
  int64_t least = 1;
  for (const int64_t first : pipeline.first_blocks) {
    if (first < least || first >= model->num_layers) {
      throw std::invalid_argument("memory: a stage begins at block " + std::to_string(first) +
                                  "; give ascending blocks from 1 to " +
                                  std::to_string(model->num_layers - 1));
    }
    least = first + 1;
  }
  if (pipeline.micro_batches < 1 || pipeline.micro_batches > spec.sequences) {
    throw std::invalid_argument("memory: got " + std::to_string(pipeline.micro_batches) +
                                " micro-batches for " + std::to_string(spec.sequences) +
                                " sequences; give a number from 1 to that of the sequences");
  }
  if (splits_backwards(pipeline.schedule)) {
    throw std::invalid_argument("memory: there is no prediction for the schedule '" +
                                std::string(to_string(pipeline.schedule)) +
                                "', which splits backwards; use another one");
  }
}

}  // namespace

void check_offload(const TrainingSpec& spec) {
  if (spec.device == DeviceKind::kCpu) {
    throw std::invalid_argument(
        "memory: got offloaded optimizer states for CPU ranks, whose states are in CPU memory "
        "already; use device cuda, or leave offload out");
  }
  if (spec.optimizer == OptimizerKind::kSgd) {
    throw std::invalid_argument(
        "memory: got offloaded optimizer states and SGD without momentum, which has no states; use "
        "another optimizer, or leave offload out");
  }
}

void check_training(const TrainingSpec& spec) {
  if (axis_size(spec.mesh, "context_parallel") > 1) {
    throw std::invalid_argument("memory: the mesh '" + spec.mesh.to_string() +
                                "' has the axis 'context_parallel', for which there is no "
                                "prediction; use pipeline_parallel, data_replicate, data_parallel "
                                "and tensor_parallel");
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
  if (spec.offloads_states) {
    check_offload(spec);
  }
  check_formats(spec);
  check_zero_stage(spec);
  check_sequence_parallel(spec);
  if (spec.steps_by_rows) {
    check_steps_by_rows(spec);
  }
  if (spec.checkpointing == Checkpointing::kSelective) {
    for (const auto& [module, style] : resolve_styles(spec)) {
      if (style.recompute) {
        throw std::invalid_argument(
            "memory: a selective checkpoint would keep activations that the rule of " +
            quote_module(module) + " recomputes; leave out one of the two");
      }
    }
  }
  std::visit([&](const auto& model) { check_model(model, spec); }, spec.model);
  check_checkpointed_blocks(spec);
  check_pipeline(spec);
}

}  // namespace weft::strategy::detail
