#include "layer_work.h"

#include "measured_layers.h"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

namespace weft::strategy::detail {

namespace {

// How often eager kernels read or write the elements of an operator's tensors in a forward. A
// backward takes twice as many passes.
constexpr double kNormPasses = 8;      // of the input: square, mean, scale, cast, weight
constexpr double kRotaryPasses = 8;    // of queries and keys: two products, a rotation, a sum
constexpr double kGatePasses = 5;      // of the hidden features: activation and product
constexpr double kResidualPasses = 3;  // of the output
constexpr double kLossPasses = 6;      // of float32 logits
constexpr double kBackwardRatio = 2;

DeviceRates slowed(DeviceRates device, double factor) {
  device.float32_flops /= factor;
  device.half_flops /= factor;
  device.bytes_per_second /= factor;
  device.seconds_per_kernel *= factor;
  return device;
}

class Model {
 public:
  Model(const TrainingSpec& spec, const Cluster& cluster)
      : spec_(spec),
        device_(slowed(cluster.device, slowdown(cluster, spec.mesh.size()))),
        styles_(resolve_styles(spec)),
        parameters_(parameters_of(spec.model, styles_)),
        tensor_size_(axis_size(spec.mesh, "tensor_parallel")),
        tensor_group_(group_of(cluster, tensor_size_, 1)),
        rows_(static_cast<double>(spec.sequences * spec.tokens)),
        own_rows_(rows_),
        shards_tokens_(spec.sequence_parallel && tensor_size_ > 1),
        is_half_(spec.precision != Precision::k32True),
        element_bytes_(is_half_ ? 2 : 4) {
    if (shards_tokens_) {
      own_rows_ = static_cast<double>(spec.sequences) * shard_of(spec.tokens, true);
    }
    int64_t num_layers = 0;
    for (const Parameter& parameter : parameters_) {
      num_layers = std::max(num_layers, parameter.layer + 1);
    }
    work_.layers.resize(static_cast<std::size_t>(num_layers));
    if (const auto* decoder = std::get_if<DecoderModel>(&spec.model)) {
      is_checkpointed_ = checkpointed_blocks(*decoder, spec);
    }
    add_parameters();
    if (const auto* decoder = std::get_if<DecoderModel>(&spec.model)) {
      add_decoder(*decoder);
    } else {
      const auto& mlp = std::get<FeedForwardModel>(spec.model);
      const double hidden = shard_of(mlp.hidden_dim, styles_.contains("w1"));
      add_elementwise(work_.layers.front(), kGatePasses * rows_ * hidden);
    }
  }

  [[nodiscard]] const ModelWork& work() const { return work_; }

 private:
  [[nodiscard]] double seconds_of(double flops, double num_bytes) const {
    const double rate = is_half_ ? device_.half_flops : device_.float32_flops;
    return device_.seconds_per_kernel +
           std::max(flops / rate, num_bytes / device_.bytes_per_second);
  }

  [[nodiscard]] double shard_of(int64_t size, bool is_sharded) const {
    return static_cast<double>(is_sharded ? (size + tensor_size_ - 1) / tensor_size_ : size);
  }

  [[nodiscard]] Style style_of(const std::string& module) const {
    const auto found = styles_.find(module);
    return found == styles_.end() ? Style::kReplicate : found->second.style;
  }

  // Whether a block's checkpoint runs the operators of a layer again, other than products.
  [[nodiscard]] bool is_checkpointed(int64_t layer) const {
    const auto block = static_cast<std::size_t>(layer) - 1;
    return layer > 0 && block < is_checkpointed_.size() && is_checkpointed_[block];
  }
  [[nodiscard]] bool runs_products_again(int64_t layer) const {
    return spec_.checkpointing == Checkpointing::kFull && is_checkpointed(layer);
  }

  void add_parameters() {
    for (const Parameter& parameter : parameters_) {
      const std::vector<int64_t> shape = tensor_parallel_shape(parameter, tensor_size_, 0);
      Work& work = work_.layers.at(static_cast<std::size_t>(parameter.layer));
      const auto num = static_cast<double>(num_elements(shape));
      work.elements += num;
      if (shape.size() < 2 || style_of(parameter.module) == Style::kVocabEmbedding ||
          parameter.module == "model.embed_tokens") {
        continue;
      }
      const bool is_cast = is_autocast() && (spec_.precision == Precision::kAutocast ||
                                             spec_.weights == WeightFormat::kLikePrecision);
      if (is_cast) {
        work.forward += seconds_of(0, num * (4 + 2));
        work.backward += seconds_of(0, num * (2 + 4));  // the gradient
      }
      add_product(work, parameter.layer, rows_, shape.at(1), shape.at(0));
      add_sums(work, parameter);
    }
  }

  void add_product(Work& work, int64_t layer, double rows, int64_t in, int64_t out) {
    const auto num_in = static_cast<double>(in);
    const auto num_out = static_cast<double>(out);
    const double flops = 2 * rows * num_in * num_out;
    const double num_bytes = element_bytes_ * (rows * (num_in + num_out) + num_in * num_out);
    const double seconds = seconds_of(flops, num_bytes);
    work.flops += flops;
    work.forward += seconds;
    work.backward += kBackwardRatio * seconds;
    work.recomputed += runs_products_again(layer) ? seconds : 0;
  }

  // The outputs of row-sharded layers are summed in the forward, the gradients of the inputs of
  // column-sharded ones in the backward: once for layers with the same input.
  void add_sums(Work& work, const Parameter& parameter) {
    const Style style = style_of(parameter.module);
    const bool is_row = style == Style::kRow;
    const bool is_head = style == Style::kColumnGatherOutput;
    const bool is_first_column =
        style == Style::kColumn &&
        (parameter.module.ends_with("q_proj") || parameter.module.ends_with("gate_proj"));
    if (tensor_size_ == 1 || !(is_row || is_head || is_first_column)) {
      return;
    }
    const auto dim = static_cast<double>(is_row ? parameter.shape.at(0) : parameter.shape.at(1));
    if (shards_tokens_ && !is_head) {
      add_exchanges(work, parameter, dim);
      return;
    }
    const double num_bytes = rows_ * dim * element_bytes_;
    const double seconds = all_reduce_seconds(tensor_group_, num_bytes);
    double& sums = is_row ? work.forward_sums : work.backward_sums;
    sums += seconds;
    work.recomputed_sums += is_row && runs_products_again(parameter.layer) ? seconds : 0;
    work.sent_bytes +=
        2 * sent_share() * num_bytes * (is_row && runs_products_again(parameter.layer) ? 2 : 1);
    if (is_head) {
      const double logit_bytes =
          rows_ * static_cast<double>(parameter.shape.at(0)) * element_bytes_;
      work.forward_sums += all_gather_seconds(tensor_group_, logit_bytes);
      work.sent_bytes += sent_share() * logit_bytes;
    }
  }

  // Adds the collectives of a layer on a sharded sequence. A fused MLP communicates in the dtype of
  // its products, other layers in that of their input.
  void add_exchanges(Work& work, const Parameter& parameter, double dim) {
    const auto found = styles_.find(parameter.module);
    const bool is_fused = found != styles_.end() && found->second.is_fused;
    const bool is_row = style_of(parameter.module) == Style::kRow;
    const bool is_again = runs_products_again(parameter.layer);
    const double num_bytes = rows_ * dim * (is_row || is_fused ? element_bytes_ : norm_bytes());
    add_exchange(work, num_bytes, true, is_again);
    add_exchange(work, num_bytes, false);
    if (is_fused && !is_row) {
      add_exchange(work, num_bytes, false);
    }
  }

  // Adds an all-gather or a reduce-scatter, which send the same bytes, and the copy in which the
  // tokens of several sequences are ordered.
  void add_exchange(Work& work, double num_bytes, bool is_forward, bool is_again = false) {
    const double copy_seconds = spec_.sequences > 1 ? seconds_of(0, 2 * num_bytes) : 0;
    const double seconds = all_gather_seconds(tensor_group_, num_bytes);
    (is_forward ? work.forward : work.backward) += copy_seconds;
    (is_forward ? work.forward_sums : work.backward_sums) += seconds;
    work.recomputed += is_again ? copy_seconds : 0;
    work.recomputed_sums += is_again ? seconds : 0;
    work.sent_bytes += sent_share() * num_bytes * (is_again ? 2 : 1);
  }

  // Adds the sums of the gradients of a block's norms.
  void add_norm_sums(Work& work, double dim) {
    for (int i = 0; i < 2; ++i) {
      const double num_bytes = dim * norm_bytes();
      work.backward_sums += all_reduce_seconds(tensor_group_, num_bytes);
      work.sent_bytes += 2 * sent_share() * num_bytes;
    }
  }

  [[nodiscard]] bool is_autocast() const {
    return spec_.precision == Precision::kAutocast ||
           (spec_.precision == Precision::kHalfMixed && num_fsdp_shards(spec_) == 1);
  }
  // Returns the bytes of an element of a norm's result, and of its gradient.
  [[nodiscard]] double norm_bytes() const { return is_autocast() ? 4 : element_bytes_; }

  [[nodiscard]] double sent_share() const {
    return static_cast<double>(tensor_size_ - 1) / static_cast<double>(tensor_size_);
  }

  void add_elementwise(Work& work, double num_elements, double bytes = 0, bool again = false) {
    const double seconds = seconds_of(0, num_elements * (bytes == 0 ? element_bytes_ : bytes));
    work.forward += seconds;
    work.backward += kBackwardRatio * seconds;
    work.recomputed += again ? seconds : 0;
  }

  void add_decoder(const DecoderModel& model) {
    const auto dim = static_cast<double>(model.dim);
    std::vector<Work>& layers = work_.layers;
    for (std::size_t i = 1; i + 1 < layers.size(); ++i) {
      const std::string block = "model.layers." + std::to_string(i - 1);
      const bool is_again = is_checkpointed(static_cast<int64_t>(i));
      const double query =
          shard_of(model.num_heads * model.head_dim, is_column(block + ".self_attn.q_proj"));
      const double key =
          shard_of(model.num_kv_heads * model.head_dim, is_column(block + ".self_attn.k_proj"));
      const double hidden = shard_of(model.hidden_dim, is_column(block + ".mlp.gate_proj"));
      add_attention(layers[i], static_cast<int64_t>(i), query, key);
      add_elementwise(layers[i], 2 * kNormPasses * own_rows_ * dim, 4, is_again);
      add_elementwise(layers[i], kRotaryPasses * rows_ * (query + key), 0, is_again);
      add_elementwise(layers[i], kGatePasses * rows_ * hidden, 0, is_again);
      add_elementwise(layers[i], 2 * kResidualPasses * own_rows_ * dim, 4, is_again);
      if (shards_tokens_) {
        add_norm_sums(layers[i], dim);
      }
    }
    if (shards_tokens_) {
      const double num_bytes = rows_ * dim * static_cast<double>(residual_bytes(spec_));
      add_exchange(work_.ends, num_bytes, true);
      add_exchange(work_.ends, num_bytes, false);
    }
    const bool is_head_sharded = style_of("lm_head") == Style::kColumn;
    add_elementwise(
        layers.back(), kLossPasses * rows_ * shard_of(model.vocab_size, is_head_sharded), 4);
    if (model.is_tied) {
      const bool is_sharded = style_of("model.embed_tokens") == Style::kVocabEmbedding;
      add_product(layers.back(),
                  model.num_layers + 1,
                  rows_,
                  model.dim,
                  static_cast<int64_t>(shard_of(model.vocab_size, is_sharded)));
    }
    if (style_of("model.embed_tokens") == Style::kVocabEmbedding && tensor_size_ > 1) {
      const double num_bytes = rows_ * dim * element_bytes_;
      layers.front().forward_sums += all_reduce_seconds(tensor_group_, num_bytes);
      layers.front().sent_bytes += 2 * sent_share() * num_bytes;
    }
  }

  [[nodiscard]] bool is_column(const std::string& module) const {
    return style_of(module) == Style::kColumn;
  }

  // Causal attention computes half of the scores, in two products; fused kernels do not write them.
  void add_attention(Work& work, int64_t layer, double query, double key) {
    const double flops = 2 * rows_ * static_cast<double>(spec_.tokens) * query;
    const double num_bytes = element_bytes_ * rows_ * 2 * (query + key);
    const double seconds = seconds_of(flops, num_bytes);
    work.flops += flops;
    work.forward += seconds;
    work.backward += (kBackwardRatio + 0.5) * seconds;  // with the scores once more
    work.recomputed += runs_products_again(layer) ? seconds : 0;
  }

  const TrainingSpec& spec_;
  DeviceRates device_;
  Styles styles_;
  std::vector<Parameter> parameters_;
  int64_t tensor_size_;
  Group tensor_group_;
  double rows_;
  double own_rows_;  // of norms and residual additions
  bool shards_tokens_;
  bool is_half_;
  double element_bytes_;
  ModelWork work_;
  std::vector<bool> is_checkpointed_;  // by block
};

}  // namespace

ModelWork model_work(const TrainingSpec& spec, const Cluster& cluster) {
  ModelWork work = Model(spec, cluster).work();
  if (cluster.layer_times) {
    replace_by_measured(work.layers, spec, cluster, [](const auto& other, const auto& alone) {
      return Model(other, alone).work().layers;
    });
  }
  return work;
}

const ModelWork& WorkCache::work_of(const TrainingSpec& spec) {
  const bool has_limit = spec.pipeline && spec.checkpointed_blocks;
  const Key key = {spec.mesh.size(),
                   axis_size(spec.mesh, "tensor_parallel"),
                   spec.sequences,
                   num_fsdp_shards(spec) > 1,
                   spec.sequence_parallel,
                   spec.checkpointing,
                   spec.checkpointed_blocks,
                   has_limit ? axis_size(spec.mesh, "pipeline_parallel") : 1,
                   has_limit ? spec.pipeline->first_blocks : std::vector<int64_t>()};
  const auto found = known_.find(key);
  return found != known_.end() ? found->second
                               : known_.emplace(key, model_work(spec, cluster_)).first->second;
}

std::vector<Work> units_of(const ModelWork& model) {
  std::vector<Work> units = model.layers;
  if (units.size() > 1) {
    units.front() += units.back();
    units.pop_back();
  }
  units.front() += model.ends;
  return units;
}

Work work_of(const StageLayers& stage, const DecoderModel& model, const ModelWork& of_model) {
  const std::vector<Work>& layers = of_model.layers;
  Work work = of_model.ends;
  if (stage.has_embedding) {
    work += layers.front();
  }
  for (int64_t block = stage.first_block; block < stage.last_block; ++block) {
    work += layers.at(static_cast<std::size_t>(block) + 1);
  }
  if (stage.has_head) {
    work += layers.back();
    work.elements += model.is_tied && !stage.has_embedding ? layers.front().elements : 0;
  }
  return work;
}

}  // namespace weft::strategy::detail
