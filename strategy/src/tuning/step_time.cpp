#include "weft/strategy/tuning/step_time.h"

#include "../memory/parameters.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace weft::strategy {

namespace {

using detail::Parameter;
using detail::Styles;

// How often eager kernels read or write the elements of an operator's tensors in a forward. A
// backward takes twice as many passes.
constexpr double kNormPasses = 8;      // of the input: square, mean, scale, cast, weight
constexpr double kRotaryPasses = 8;    // of queries and keys: two products, a rotation, a sum
constexpr double kGatePasses = 5;      // of the hidden features: activation and product
constexpr double kResidualPasses = 3;  // of the output
constexpr double kLossPasses = 6;      // of float32 logits
constexpr double kBackwardRatio = 2;

int64_t axis_size(const Mesh& mesh, std::string_view axis) {
  return mesh.has_axis(axis) ? mesh.size(axis) : 1;
}

// The work of one unit of FSDP2: a block, or the root unit with everything else.
struct Unit {
  double forward = 0;  // seconds of the forward's kernels
  double backward = 0;
  double recomputed = 0;    // seconds of the kernels that a checkpoint runs again
  double forward_sums = 0;  // seconds of tensor-parallel collectives
  double backward_sums = 0;
  double recomputed_sums = 0;
  double flops = 0;       // of the forward
  double sent_bytes = 0;  // over the tensor-parallel group
  double elements = 0;    // of the rank's tensor-parallel shards
};

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
        styles_(detail::resolve_styles(spec)),
        parameters_(detail::parameters_of(spec.model, styles_)),
        tensor_size_(axis_size(spec.mesh, "tensor_parallel")),
        tensor_group_(group_of(cluster, tensor_size_, 1)),
        rows_(static_cast<double>(spec.sequences * spec.tokens)),
        is_half_(spec.precision != Precision::k32True),
        element_bytes_(is_half_ ? 2 : 4) {
    int64_t num_units = 0;
    for (const Parameter& parameter : parameters_) {
      num_units = std::max(num_units, parameter.unit + 1);
    }
    units_.resize(static_cast<std::size_t>(num_units));
    add_parameters();
    if (const auto* decoder = std::get_if<DecoderModel>(&spec.model)) {
      add_decoder(*decoder);
    } else {
      const auto& mlp = std::get<FeedForwardModel>(spec.model);
      const double hidden = shard_of(mlp.hidden_dim, styles_.contains("w1"));
      add_elementwise(units_.front(), kGatePasses * rows_ * hidden);
    }
  }

  [[nodiscard]] const std::vector<Unit>& units() const { return units_; }

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

  // Whether a block's checkpoint runs the operators of a unit again, other than products.
  [[nodiscard]] bool is_checkpointed(int64_t unit) const {
    return spec_.checkpointing != Checkpointing::kNone && unit > 0;
  }
  [[nodiscard]] bool runs_products_again(int64_t unit) const {
    return spec_.checkpointing == Checkpointing::kFull && unit > 0;
  }

  void add_parameters() {
    for (const Parameter& parameter : parameters_) {
      const std::vector<int64_t> shape = detail::tensor_parallel_shape(parameter, tensor_size_, 0);
      Unit& unit = units_.at(static_cast<std::size_t>(parameter.unit));
      const auto num = static_cast<double>(detail::num_elements(shape));
      unit.elements += num;
      if (shape.size() < 2 || style_of(parameter.module) == Style::kVocabEmbedding ||
          parameter.module == "model.embed_tokens") {
        continue;
      }
      const bool is_cast = spec_.precision == Precision::kAutocast ||
                           (spec_.precision == Precision::kHalfMixed &&
                            axis_size(spec_.mesh, "data_parallel") == 1 &&
                            spec_.weights == WeightFormat::kLikePrecision);
      if (is_cast) {
        unit.forward += seconds_of(0, num * (4 + 2));
        unit.backward += seconds_of(0, num * (2 + 4));  // the gradient
      }
      add_product(unit, parameter.unit, rows_, shape.at(1), shape.at(0));
      add_sums(unit, parameter);
    }
  }

  void add_product(Unit& unit, int64_t unit_index, double rows, int64_t in, int64_t out) {
    const auto num_in = static_cast<double>(in);
    const auto num_out = static_cast<double>(out);
    const double flops = 2 * rows * num_in * num_out;
    const double num_bytes = element_bytes_ * (rows * (num_in + num_out) + num_in * num_out);
    const double seconds = seconds_of(flops, num_bytes);
    unit.flops += flops;
    unit.forward += seconds;
    unit.backward += kBackwardRatio * seconds;
    unit.recomputed += runs_products_again(unit_index) ? seconds : 0;
  }

  // The outputs of row-sharded layers are summed in the forward, the gradients of the inputs of
  // column-sharded ones in the backward: once for layers with the same input.
  void add_sums(Unit& unit, const Parameter& parameter) {
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
    double& sums = is_row ? unit.forward_sums : unit.backward_sums;
    sums += seconds;
    unit.recomputed_sums += is_row && runs_products_again(parameter.unit) ? seconds : 0;
    unit.sent_bytes +=
        2 * sent_share() * num_bytes * (is_row && runs_products_again(parameter.unit) ? 2 : 1);
    if (is_head) {
      const double logit_bytes =
          rows_ * static_cast<double>(parameter.shape.at(0)) * element_bytes_;
      unit.forward_sums += all_gather_seconds(tensor_group_, logit_bytes);
      unit.sent_bytes += sent_share() * logit_bytes;
    }
  }

  [[nodiscard]] double sent_share() const {
    return static_cast<double>(tensor_size_ - 1) / static_cast<double>(tensor_size_);
  }

  void add_elementwise(Unit& unit, double num_elements, double bytes = 0, bool again = false) {
    const double seconds = seconds_of(0, num_elements * (bytes == 0 ? element_bytes_ : bytes));
    unit.forward += seconds;
    unit.backward += kBackwardRatio * seconds;
    unit.recomputed += again ? seconds : 0;
  }

  void add_decoder(const DecoderModel& model) {
    const auto dim = static_cast<double>(model.dim);
    for (std::size_t i = 1; i < units_.size(); ++i) {
      const std::string block = "model.layers." + std::to_string(i - 1);
      const bool is_again = is_checkpointed(static_cast<int64_t>(i));
      const double query =
          shard_of(model.num_heads * model.head_dim, is_column(block + ".self_attn.q_proj"));
      const double key =
          shard_of(model.num_kv_heads * model.head_dim, is_column(block + ".self_attn.k_proj"));
      const double hidden = shard_of(model.hidden_dim, is_column(block + ".mlp.gate_proj"));
      add_attention(units_[i], static_cast<int64_t>(i), query, key);
      add_elementwise(units_[i], 2 * kNormPasses * rows_ * dim, 4, is_again);
      add_elementwise(units_[i], kRotaryPasses * rows_ * (query + key), 0, is_again);
      add_elementwise(units_[i], kGatePasses * rows_ * hidden, 0, is_again);
      add_elementwise(units_[i], 2 * kResidualPasses * rows_ * dim, 4, is_again);
    }
    const bool is_head_sharded = style_of("lm_head") == Style::kColumn;
    add_elementwise(
        units_.front(), kLossPasses * rows_ * shard_of(model.vocab_size, is_head_sharded), 4);
    if (model.is_tied) {
      const bool is_sharded = style_of("model.embed_tokens") == Style::kVocabEmbedding;
      add_product(units_.front(),
                  0,
                  rows_,
                  model.dim,
                  static_cast<int64_t>(shard_of(model.vocab_size, is_sharded)));
    }
    if (style_of("model.embed_tokens") == Style::kVocabEmbedding && tensor_size_ > 1) {
      const double num_bytes = rows_ * dim * element_bytes_;
      units_.front().forward_sums += all_reduce_seconds(tensor_group_, num_bytes);
      units_.front().sent_bytes += 2 * sent_share() * num_bytes;
    }
  }

  [[nodiscard]] bool is_column(const std::string& module) const {
    return style_of(module) == Style::kColumn;
  }

  // Causal attention computes half of the scores, in two products; fused kernels do not write them.
  void add_attention(Unit& unit, int64_t unit_index, double query, double key) {
    const double flops = 2 * rows_ * static_cast<double>(spec_.tokens) * query;
    const double num_bytes = element_bytes_ * rows_ * 2 * (query + key);
    const double seconds = seconds_of(flops, num_bytes);
    unit.flops += flops;
    unit.forward += seconds;
    unit.backward += (kBackwardRatio + 0.5) * seconds;  // with the scores once more
    unit.recomputed += runs_products_again(unit_index) ? seconds : 0;
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
  std::vector<Unit> units_;
};

// The collectives of data-parallel ranks and replicas.
class DataParallel {
 public:
  DataParallel(const TrainingSpec& spec, const Cluster& cluster)
      : data_size_(axis_size(spec.mesh, "data_parallel")),
        num_replicas_(axis_size(spec.mesh, "data_replicate")),
        gathered_bytes_(
            spec.precision == Precision::k32True || spec.precision == Precision::kAutocast ? 4 : 2),
        gradient_bytes_(spec.precision == Precision::kHalfTrue && data_size_ == 1 ? 2 : 4) {
    const int64_t tensor_size = axis_size(spec.mesh, "tensor_parallel");
    data_group_ = group_of(cluster, data_size_, tensor_size);
    replica_group_ = group_of(cluster, num_replicas_, tensor_size * data_size_);
  }

  [[nodiscard]] double gather_seconds(const Unit& unit) const {
    return all_gather_seconds(data_group_, unit.elements * gathered_bytes_);
  }
  [[nodiscard]] double reduce_seconds(const Unit& unit) const {
    const double num_bytes = unit.elements * gradient_bytes_;
    return reduce_scatter_seconds(data_group_, num_bytes) +
           all_reduce_seconds(replica_group_, num_bytes / static_cast<double>(data_size_));
  }
  // Return the bytes that a rank sends for a unit: for its gathers, and for its reductions.
  [[nodiscard]] double gather_bytes(const Unit& unit, int64_t num_gathers) const {
    return share(data_size_) * static_cast<double>(num_gathers) * unit.elements * gathered_bytes_;
  }
  [[nodiscard]] double reduce_bytes(const Unit& unit) const {
    const double reduced = unit.elements * gradient_bytes_;
    return share(data_size_) * reduced +
           2 * share(num_replicas_) * reduced / static_cast<double>(data_size_);
  }

 private:
  static double share(int64_t size) {
    return static_cast<double>(size - 1) / static_cast<double>(size);
  }

  int64_t data_size_;
  int64_t num_replicas_;
  double gathered_bytes_;
  double gradient_bytes_;
  Group data_group_;
  Group replica_group_;
};

// Returns the seconds for which a device waits for communication, when each `communication[i]` runs
// beside `compute[i]`.
double exposed_seconds(const std::vector<double>& communication,
                       const std::vector<double>& compute,
                       bool overlaps) {
  double exposed = 0;
  for (std::size_t i = 0; i < communication.size(); ++i) {
    exposed += overlaps ? std::max(0.0, communication[i] - compute[i]) : communication[i];
  }
  return exposed;
}

// Returns the seconds of one micro-batch; the last one also reduces gradients. Units run in the
// order root, blocks; the head, which belongs to the root unit, runs at the end.
double data_parallel_seconds(const std::vector<Unit>& units,
                             const DataParallel& collectives,
                             bool overlaps,
                             bool is_last) {
  const auto reduce_seconds = [&](const Unit& unit) {
    return is_last ? collectives.reduce_seconds(unit) : 0;
  };
  const std::size_t num = units.size();
  // Forward: unit i + 1 is gathered beside unit i, the first two before anything can compute.
  std::vector<double> gathers = {collectives.gather_seconds(units[0])};
  std::vector<double> beside = {0};
  for (std::size_t i = 1; i < num; ++i) {
    gathers.push_back(collectives.gather_seconds(units[i]));
    beside.push_back(i == 1 ? 0 : units[i - 1].forward + units[i - 1].forward_sums);
  }
  double exposed = exposed_seconds(gathers, beside, overlaps);
  // Backward: beside block i, block i - 1 is gathered and the gradients of block i + 1 are reduced.
  // The last block stays gathered after the forward, and the root's gradients are reduced last.
  std::vector<double> messages;
  beside.clear();
  for (std::size_t i = num; i-- > 1;) {
    messages.push_back((i > 1 ? collectives.gather_seconds(units[i - 1]) : 0) +
                       (i + 1 < num ? reduce_seconds(units[i + 1]) : 0));
    beside.push_back(units[i].backward + units[i].recomputed + units[i].backward_sums +
                     units[i].recomputed_sums);
  }
  if (num > 1) {
    messages.push_back(reduce_seconds(units[1]));
    beside.push_back(0);
  }
  messages.push_back(reduce_seconds(units[0]));
  beside.push_back(0);
  exposed += exposed_seconds(messages, beside, overlaps);
  return exposed;
}

// The optimizer reads the weight, the gradient and the states, and writes the weight and the
// states.
double optimizer_seconds(const TrainingSpec& spec,
                         const std::vector<Unit>& units,
                         const Cluster& cluster) {
  double num_elements = 0;
  for (const Unit& unit : units) {
    num_elements += unit.elements;
  }
  num_elements /= static_cast<double>(axis_size(spec.mesh, "data_parallel"));
  const bool is_half =
      spec.precision == Precision::kHalfTrue || spec.weights != WeightFormat::kLikePrecision;
  const double weight_bytes = is_half ? 2 : 4;
  const double low_bytes = spec.weights == WeightFormat::kSplit    ? 2
                           : spec.weights == WeightFormat::kSplit8 ? 1
                                                                   : 0;
  double moment_bytes = weight_bytes;
  if (spec.states == StateFormat::kFloat32) {
    moment_bytes = 4;
  } else if (spec.states == StateFormat::kBFloat16) {
    moment_bytes = 2;
  } else if (spec.states == StateFormat::kInt8) {
    moment_bytes = 1;
  }
  const double num_moments =
      spec.optimizer == OptimizerKind::kSgd                                               ? 0
      : spec.optimizer == OptimizerKind::kAdam || spec.optimizer == OptimizerKind::kAdamW ? 2
                                                                                          : 1;
  const double gradient_bytes = weight_bytes;
  const double passes =
      gradient_bytes + 2 * (weight_bytes + low_bytes + num_moments * moment_bytes);
  return slowdown(cluster, spec.mesh.size()) * num_elements * passes /
         cluster.device.bytes_per_second;
}

}  // namespace

StepTime predict_step_time(const TrainingSpec& spec, const Cluster& cluster) {
  distinct_ranks(spec);  // checks the spec
  const Model model(spec, cluster);
  const std::vector<Unit>& units = model.units();
  const DataParallel collectives(spec, cluster);
  StepTime time;
  double reduced_bytes = 0;
  for (std::size_t i = 0; i < units.size(); ++i) {
    const Unit& unit = units[i];
    time.compute += unit.forward + unit.backward;
    time.recomputation += unit.recomputed + unit.recomputed_sums;
    time.tensor_parallel += unit.forward_sums + unit.backward_sums;
    time.model_flops += 3 * unit.flops;
    const bool stays_gathered = i == 0 || i + 1 == units.size();
    time.sent_bytes += unit.sent_bytes + collectives.gather_bytes(unit, stays_gathered ? 1 : 2);
    reduced_bytes += collectives.reduce_bytes(unit);
  }
  const auto num = static_cast<double>(spec.micro_batches);
  for (double* each : {&time.compute,
                       &time.recomputation,
                       &time.tensor_parallel,
                       &time.model_flops,
                       &time.sent_bytes}) {
    *each *= num;
  }
  time.sent_bytes += reduced_bytes;
  const bool overlaps = cluster.device.overlaps;
  time.data_parallel = (num - 1) * data_parallel_seconds(units, collectives, overlaps, false) +
                       data_parallel_seconds(units, collectives, overlaps, true);
  time.optimizer = optimizer_seconds(spec, units, cluster);
  return time;
}

}  // namespace weft::strategy
