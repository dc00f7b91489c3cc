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
        is_half_(spec.precision != Precision::k32True),
        element_bytes_(is_half_ ? 2 : 4) {
    int64_t num_layers = 0;
    for (const Parameter& parameter : parameters_) {
      num_layers = std::max(num_layers, parameter.layer + 1);
    }
    layers_.resize(static_cast<std::size_t>(num_layers));
    if (const auto* decoder = std::get_if<DecoderModel>(&spec.model)) {
      is_checkpointed_ = checkpointed_blocks(*decoder, spec);
    }
    add_parameters();
    if (const auto* decoder = std::get_if<DecoderModel>(&spec.model)) {
      add_decoder(*decoder);
    } else {
      const auto& mlp = std::get<FeedForwardModel>(spec.model);
      const double hidden = shard_of(mlp.hidden_dim, styles_.contains("w1"));
      add_elementwise(layers_.front(), kGatePasses * rows_ * hidden);
    }
  }

  [[nodiscard]] const std::vector<Work>& layers() const { return layers_; }

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
      Work& work = layers_.at(static_cast<std::size_t>(parameter.layer));
      const auto num = static_cast<double>(num_elements(shape));
      work.elements += num;
      if (shape.size() < 2 || style_of(parameter.module) == Style::kVocabEmbedding ||
          parameter.module == "model.embed_tokens") {
        continue;
      }
      const bool is_cast =
          spec_.precision == Precision::kAutocast ||
          (spec_.precision == Precision::kHalfMixed && num_fsdp_shards(spec_) == 1 &&
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
    for (std::size_t i = 1; i + 1 < layers_.size(); ++i) {
      const std::string block = "model.layers." + std::to_string(i - 1);
      const bool is_again = is_checkpointed(static_cast<int64_t>(i));
      const double query =
          shard_of(model.num_heads * model.head_dim, is_column(block + ".self_attn.q_proj"));
      const double key =
          shard_of(model.num_kv_heads * model.head_dim, is_column(block + ".self_attn.k_proj"));
      const double hidden = shard_of(model.hidden_dim, is_column(block + ".mlp.gate_proj"));
      add_attention(layers_[i], static_cast<int64_t>(i), query, key);
      add_elementwise(layers_[i], 2 * kNormPasses * rows_ * dim, 4, is_again);
      add_elementwise(layers_[i], kRotaryPasses * rows_ * (query + key), 0, is_again);
      add_elementwise(layers_[i], kGatePasses * rows_ * hidden, 0, is_again);
      add_elementwise(layers_[i], 2 * kResidualPasses * rows_ * dim, 4, is_again);
    }
    const bool is_head_sharded = style_of("lm_head") == Style::kColumn;
    add_elementwise(
        layers_.back(), kLossPasses * rows_ * shard_of(model.vocab_size, is_head_sharded), 4);
    if (model.is_tied) {
      const bool is_sharded = style_of("model.embed_tokens") == Style::kVocabEmbedding;
      add_product(layers_.back(),
                  model.num_layers + 1,
                  rows_,
                  model.dim,
                  static_cast<int64_t>(shard_of(model.vocab_size, is_sharded)));
    }
    if (style_of("model.embed_tokens") == Style::kVocabEmbedding && tensor_size_ > 1) {
      const double num_bytes = rows_ * dim * element_bytes_;
      layers_.front().forward_sums += all_reduce_seconds(tensor_group_, num_bytes);
      layers_.front().sent_bytes += 2 * sent_share() * num_bytes;
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
  bool is_half_;
  double element_bytes_;
  std::vector<Work> layers_;
  std::vector<bool> is_checkpointed_;  // by block
};

}  // namespace

std::vector<Work> layers_of(const TrainingSpec& spec, const Cluster& cluster) {
  std::vector<Work> layers = Model(spec, cluster).layers();
  if (cluster.layer_times) {
    replace_by_measured(layers, spec, cluster, [](const auto& other, const auto& alone) {
      return Model(other, alone).layers();
    });
  }
  return layers;
}

std::vector<Work> units_of(std::vector<Work> layers) {
  if (layers.size() > 1) {
    layers.front() += layers.back();
    layers.pop_back();
  }
  return layers;
}

Work work_of(const StageLayers& stage, const DecoderModel& model, const std::vector<Work>& layers) {
  Work work;
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
