#include "rank_memory.h"

#include "weft/strategy/row_blocks.h"

#include <algorithm>
#include <utility>

namespace weft::strategy::detail {

namespace {

// The same numbers as in weft.strategy.optimizers.{state_format,state_shards}.
constexpr int64_t kMinElements = 4096;   // smaller parameters have float32 states
constexpr int64_t kBlockElements = 256;  // of a row of codes that share a scale

}  // namespace

int64_t num_moments(OptimizerKind optimizer) {
  switch (optimizer) {
    case OptimizerKind::kSgd:
      return 0;
    case OptimizerKind::kSgdMomentum:
    case OptimizerKind::kAdagrad:
      return 1;
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      return 2;
  }
  return 0;
}

// All optimizers but SGD count each parameter's steps in a float32 tensor of one element.
int64_t step_count_bytes(OptimizerKind optimizer) {
  const bool is_sgd = optimizer == OptimizerKind::kSgd || optimizer == OptimizerKind::kSgdMomentum;
  return is_sgd ? 0 : 4;
}

RankMemory::RankMemory(const TrainingSpec& spec, int64_t global_rank, Timeline& timeline)
    : spec_(spec),
      timeline_(timeline),
      styles_(resolve_styles(spec)),
      parameters_(parameters_on_rank(parameters_of(spec.model, styles_), spec, global_rank)),
      parameter_buffers_(parameters_.size()),
      tp_size_(axis_size(spec.mesh, "tensor_parallel")),
      tp_rank_(coordinate_on(spec.mesh, "tensor_parallel", global_rank)),
      dp_size_(num_fsdp_shards(spec)),
      num_replicas_(num_averaged_replicas(spec)),
      num_state_shards_(spec.zero_stage == 1 ? axis_size(spec.mesh, "data_parallel") : 1),
      activation_bytes_(spec.precision == Precision::k32True ? 4 : 2),
      wide_bytes_(residual_bytes(spec)),
      initial_bytes_(spec.precision == Precision::kHalfTrue ? 2 : 4) {
  has_embedding_ = coordinate_on(spec.mesh, "pipeline_parallel", global_rank) == 0;
  int64_t num_units = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    shapes_.push_back(tensor_parallel_shape(parameters_[i], tp_size_, tp_rank_));
    by_module_[parameters_[i].module].push_back(i);
    num_units = std::max(num_units, unit_of(i) + 1);
  }
  unsharded_units_.resize(static_cast<std::size_t>(num_units));
  if (num_replicas_ > 1 && !spec.steps_in_backward) {
    const bool has_split = spec.weights != WeightFormat::kLikePrecision;
    std::vector<GradientBuckets::Gradient> gradients;
    gradients.reserve(parameters_.size());
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const int64_t element_bytes = has_split && is_split(i) ? 2 : initial_bytes_;
      gradients.push_back(
          {.num_bytes = local_elements(i) * element_bytes, .element_bytes = element_bytes});
    }
    buckets_.emplace(timeline, gradients);
  }
}

// Without a pipeline, the root unit 0 has the embedding, the final norm and the output layer. In
// stages, the final norm and the output layer are units of their own, also with a tied weight.
int64_t RankMemory::unit_of(std::size_t idx) const {
  const Parameter& parameter = parameters_[idx];
  const auto* model = std::get_if<DecoderModel>(&spec_.model);
  if (model == nullptr) {
    return parameter.layer;
  }
  const bool is_head = parameter.layer > model->num_layers || has_copy_elsewhere(idx);
  if (!is_in_stages()) {
    return is_head ? 0 : parameter.layer;
  }
  if (parameter.module == "model.norm") {
    return model->num_layers + 1;
  }
  return is_head && !(parameter.layer == 0 && has_embedding_) ? model->num_layers + 2
                                                              : parameter.layer;
}

bool RankMemory::has_copy_elsewhere(std::size_t idx) const {
  const auto* model = std::get_if<DecoderModel>(&spec_.model);
  return is_in_stages() && model != nullptr && model->is_tied && parameters_[idx].layer == 0;
}

std::vector<int64_t> RankMemory::units_of(const StageLayers& stage) const {
  std::vector<int64_t> units;
  if (stage.has_embedding) {
    units.push_back(0);
  }
  for (int64_t block = stage.first_block; block < stage.last_block; ++block) {
    units.push_back(block + 1);
  }
  if (stage.has_head) {
    units.push_back(stage.last_block + 1);
    units.push_back(stage.last_block + 2);
  }
  return units;
}

Buffer RankMemory::product(MemoryCategory category, int64_t num_bytes) {
  if (reuses_products()) {
    Buffer recorded = std::move(replayed_->front());
    replayed_->pop_front();
    return recorded;
  }
  if (recorded_ != nullptr) {
    recorded_->push_back(hold_bytes(MemoryCategory::kSavedActivations, num_bytes));
    return recorded_->back();
  }
  return hold_bytes(replayed_ != nullptr ? MemoryCategory::kScratch : category, num_bytes);
}

int64_t RankMemory::weight_dim_size(const std::string& module, std::size_t dim) const {
  return shapes_[by_module_.at(module).front()].at(dim);
}

const ModuleStyle& RankMemory::style(const std::string& module) const {
  static const ModuleStyle kNone;
  const auto found = styles_.find(module);
  return found == styles_.end() ? kNone : found->second;
}

bool RankMemory::is_small(std::size_t idx) const {
  const auto& shape = parameters_[idx].shape;
  return shape.size() < 2 || num_elements(shape) < kMinElements;
}

bool RankMemory::is_split(std::size_t idx) const {
  return spec_.weights != WeightFormat::kLikePrecision &&
         (initial_bytes_ == 2 || dp_size_ > 1 || !is_small(idx));
}

int64_t RankMemory::element_bytes(std::size_t idx) const {
  return has_split_weights_ && is_split(idx) ? 2 : initial_bytes_;
}

// FSDP2 pads every rank's shard to the number of rows of the first.
int64_t RankMemory::local_elements(std::size_t idx) const {
  const auto& shape = shapes_[idx];
  if (dp_size_ == 1 || shape.front() == 0) {
    return num_elements(shape);
  }
  const int64_t rows = (shape.front() + dp_size_ - 1) / dp_size_;
  return num_elements(shape) / shape.front() * rows;
}

int64_t RankMemory::stepped_elements(std::size_t idx) const {
  return (local_elements(idx) + num_state_shards_ - 1) / num_state_shards_;
}

int64_t RankMemory::moment_bytes(std::size_t idx) const {
  const int64_t num = stepped_elements(idx);
  if (spec_.states == StateFormat::kLikeParameters) {
    return num * element_bytes(idx);
  }
  if (spec_.states == StateFormat::kFloat32 || is_small(idx)) {
    return num * 4;
  }
  if (spec_.states == StateFormat::kBFloat16) {
    return num * 2;
  }
  const auto& shape = shapes_[idx];
  if (num == 0) {
    return 0;
  }
  const int64_t columns = num_elements(shape) / shape.front();
  const int64_t blocks_of_row = (columns + kBlockElements - 1) / kBlockElements;
  return num + num / columns * blocks_of_row * 4;
}

int64_t RankMemory::low_bits_bytes(std::size_t idx) const {
  return is_split(idx) ? local_elements(idx) * (spec_.weights == WeightFormat::kSplit ? 2 : 1) : 0;
}

int64_t RankMemory::gathered_bytes(std::size_t idx) const {
  return gathers_in_half() ? 2 : element_bytes(idx);
}

int64_t RankMemory::unsharded_bytes(std::size_t idx) const {
  return local_elements(idx) * dp_size_ * gathered_bytes(idx);
}

int64_t RankMemory::unit_elements(int64_t unit) const {
  int64_t num = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    num += unit_of(i) == unit ? local_elements(i) * dp_size_ : 0;
  }
  return num;
}

int64_t RankMemory::unit_bytes(int64_t unit) const {
  int64_t num_bytes = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    num_bytes += unit_of(i) == unit ? unsharded_bytes(i) : 0;
  }
  return num_bytes;
}

Buffer RankMemory::saved_weight_copies(const std::string& module) {
  const int64_t num = num_cast_elements(module);
  return num > 0 ? saved(num) : Buffer();
}

Buffer RankMemory::gradient_products(const std::string& module) {
  const int64_t num = num_cast_elements(module);
  return num > 0 ? scratch(num) : Buffer();
}

int64_t RankMemory::num_cast_elements(const std::string& module) const {
  int64_t num = 0;
  for (const std::size_t idx : by_module_.at(module)) {
    num += is_autocast() && element_bytes(idx) == 4 ? num_elements(shapes_[idx]) : 0;
  }
  return num;
}

void RankMemory::initialize() {
  model_buffers_ =
      hold_bytes(MemoryCategory::kParameters, num_buffer_elements(spec_.model) * initial_bytes_);
  hold_staging(staging_, 0, 0);
  std::vector<Buffer> unsharded(parameters_.size());
  Buffer of_other_stages;
  if (!spec_.has_deferred_init) {
    int64_t num_others = 0;
    for (const Parameter& parameter : parameters_of(spec_.model, styles_)) {
      num_others += by_module_.contains(parameter.module) ? 0 : num_elements(parameter.shape);
    }
    of_other_stages = hold_bytes(MemoryCategory::kParameters, num_others * initial_bytes_);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      unsharded[i] = hold_bytes(MemoryCategory::kParameters,
                                num_elements(parameters_[i].shape) * initial_bytes_);
    }
    if (tp_size_ * dp_size_ == 1) {
      for (std::size_t i = 0; i < parameters_.size(); ++i) {
        parameter_buffers_[i].parameter = std::move(unsharded[i]);
      }
      return;
    }
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool is_sharded = dp_size_ > 1 || (tp_size_ > 1 && parameters_[i].shard_dim);
    parameter_buffers_[i].parameter = unsharded[i] && !is_sharded
                                          ? unsharded[i]
                                          : hold_bytes(MemoryCategory::kParameters, local_bytes(i));
    unsharded[i].reset();
  }
}

void RankMemory::split_weights() {
  if (spec_.weights == WeightFormat::kLikePrecision) {
    return;
  }
  has_split_weights_ = true;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    ParameterBuffers& buffers = parameter_buffers_[i];
    if (is_split(i)) {
      buffers.low_bits = hold_bytes(MemoryCategory::kOptimizerState, low_bits_bytes(i));
    }
    if (is_split(i) && initial_bytes_ == 4) {
      buffers.parameter = hold_bytes(MemoryCategory::kParameters, local_bytes(i));
    }
  }
  for (std::size_t i = 0; i < parameters_.size() && spec_.offloads_states; ++i) {
    parameter_buffers_[i].low_bits.reset();  // all weights are split before the bits move
  }
}

int64_t RankMemory::state_bytes(std::size_t idx) const {
  const bool is_torchs = spec_.states == StateFormat::kLikeParameters;
  const int64_t count_bytes = is_torchs ? step_count_bytes(spec_.optimizer) : 4;
  return num_moments(spec_.optimizer) * moment_bytes(idx) + count_bytes;
}

void RankMemory::make_optimizer_state() {
  for (std::size_t i = 0; i < parameters_.size() && !spec_.offloads_states; ++i) {
    parameter_buffers_[i].state = hold_bytes(MemoryCategory::kOptimizerState, state_bytes(i));
  }
}

void RankMemory::make_gradients(const std::string& module) {
  for (const std::size_t idx : by_module_.at(module)) {
    accumulate(idx, new_gradient(idx));
  }
}

void RankMemory::make_mlp_gradients(const std::string& module) {
  for (const std::size_t idx : by_module_.at(module)) {
    if (spec_.steps_by_rows && shapes_[idx].size() == 2) {
      step_by_rows(idx);
    } else if (sums_gradients()) {
      mlp_gradients_.emplace_back(idx, new_gradient(idx));
    } else {
      accumulate(idx, new_gradient(idx));
    }
  }
}

void RankMemory::add_mlp_gradients() {
  for (auto& [idx, gradient] : mlp_gradients_) {
    accumulate(idx, std::move(gradient));
  }
  mlp_gradients_.clear();
}

int64_t RankMemory::rows_at_once(const std::string& module) const {
  const std::size_t idx = by_module_.at(module).front();
  const auto& shape = shapes_[idx];
  if (!spec_.steps_by_rows) {
    return shape[0];
  }
  return std::min(shape[0], rows_per_block(spec_.device, shape[0], shape[1] * element_bytes(idx)));
}

void RankMemory::step_by_rows(std::size_t idx) {
  const int64_t num = rows_at_once(parameters_[idx].module) * shapes_[idx][1];
  const Buffer product = scratch(num);
  const bool is_cast = activation_bytes_ != element_bytes(idx);
  const Buffer gradient =
      is_cast ? hold_bytes(MemoryCategory::kScratch, num * element_bytes(idx)) : Buffer();
  step_temporaries(num * element_bytes(idx));
}

Buffer RankMemory::weight_sized(const std::string& module) {
  int64_t num_bytes = 0;
  for (const std::size_t idx : by_module_.at(module)) {
    num_bytes += num_elements(shapes_[idx]) * gathered_bytes(idx);
  }
  return hold_bytes(MemoryCategory::kScratch, num_bytes);
}

Buffer RankMemory::new_gradient(std::size_t idx) {
  if (dp_size_ > 1) {
    return hold_bytes(MemoryCategory::kScratch, num_elements(shapes_[idx]) * gathered_bytes(idx));
  }
  const bool is_added = parameter_buffers_[idx].gradient != nullptr;
  return hold_bytes(is_added ? MemoryCategory::kScratch : MemoryCategory::kGradients,
                    local_bytes(idx));
}

void RankMemory::accumulate(std::size_t idx, Buffer gradient) {
  ParameterBuffers& buffers = parameter_buffers_[idx];
  Buffer& sum = dp_size_ > 1 ? buffers.unsharded_gradient : buffers.gradient;
  // FSDP2 adds up gradients that it does not reduce yet in float32. On the CPU, the addition of a
  // gradient in half precision converts it first.
  const bool is_cast = dp_size_ > 1 && gathered_bytes(idx) == 2;
  const auto float32 = [&] {
    return hold_bytes(MemoryCategory::kScratch, num_elements(shapes_[idx]) * 4);
  };
  if (sum && is_cast && spec_.device == DeviceKind::kCpu) {
    float32();
  } else if (!sum) {
    sum = is_cast && is_in_stages() ? float32() : gradient;
  }
  gradient.reset();
  if (buckets_ && !is_in_stages()) {
    buckets_->complete(idx);
  }
  if (dp_size_ == 1 && spec_.steps_in_backward && completes_gradients_ &&
      !has_copy_elsewhere(idx)) {
    step_in_backward(idx, buffers.gradient);
  }
}

void RankMemory::drop_gradients() {
  for (ParameterBuffers& buffers : parameter_buffers_) {
    buffers.gradient.reset();
  }
}

Buffer RankMemory::step_temporaries(int64_t parameter_bytes) {
  if (spec_.offloads_states || spec_.has_fused_optimizer ||
      spec_.states != StateFormat::kLikeParameters || num_moments(spec_.optimizer) == 0 ||
      spec_.optimizer == OptimizerKind::kSgdMomentum) {
    return {};
  }
  Buffer root = hold_bytes(MemoryCategory::kScratch, parameter_bytes);
  if (spec_.optimizer == OptimizerKind::kAdagrad) {
    return root;
  }
  return hold_bytes(MemoryCategory::kScratch, parameter_bytes);  // the bias-corrected root
}

void RankMemory::step() {
  if (spec_.steps_in_backward) {
    return;
  }
  Buffer divisor;  // a parameter's divisor lives until that of the next parameter is computed
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    divisor = step_temporaries(stepped_elements(i) * element_bytes(i));
  }
  divisor.reset();
  if (num_state_shards_ > 1) {
    gather_stepped();
  }
}

}  // namespace weft::strategy::detail
