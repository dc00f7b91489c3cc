#include "rank_memory.h"

#include "weft/strategy/row_blocks.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace weft::strategy::detail {

namespace {

// The most bytes of each of a rank's two staging buffers in the shared-memory backend.
constexpr int64_t kMaxStagingBytes = int64_t{1} << 20;
constexpr int64_t kPageBytes = 4096;
// The same numbers as in weft.strategy.optimizers.{state_format,state_shards}.
constexpr int64_t kMinElements = 4096;   // smaller parameters have float32 states
constexpr int64_t kBlockElements = 256;  // of a row of codes that share a scale

int64_t to_pages(int64_t num_bytes) {
  return (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

int64_t coordinate(const Mesh& mesh, std::string_view axis, int64_t global_rank) {
  const auto coordinates = mesh.coordinates(global_rank);
  for (std::size_t i = 0; i < coordinates.size(); ++i) {
    if (mesh.axes()[i].name == axis) {
      return coordinates[i];
    }
  }
  return 0;
}

}  // namespace

int64_t axis_size(const Mesh& mesh, std::string_view axis) {
  return mesh.has_axis(axis) ? mesh.size(axis) : 1;
}

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
      parameters_(parameters_of(spec.model, styles_)),
      parameter_buffers_(parameters_.size()),
      tp_size_(axis_size(spec.mesh, "tensor_parallel")),
      dp_size_(axis_size(spec.mesh, "data_parallel")),
      activation_bytes_(spec.precision == Precision::k32True ? 4 : 2),
      // Embeddings with split weights, or that FSDP2 gathers, make the residual stream bfloat16.
      wide_bytes_(spec.precision == Precision::kHalfTrue ||
                          spec.weights != WeightFormat::kLikePrecision || gathers_in_half()
                      ? 2
                      : 4),
      initial_bytes_(spec.precision == Precision::kHalfTrue ? 2 : 4) {
  const int64_t tp_rank = coordinate(spec.mesh, "tensor_parallel", global_rank);
  int64_t num_units = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    shapes_.push_back(tensor_parallel_shape(parameters_[i], tp_size_, tp_rank));
    by_module_[parameters_[i].module].push_back(i);
    num_units = std::max(num_units, parameters_[i].unit + 1);
  }
  unsharded_units_.resize(static_cast<std::size_t>(num_units));
}

Buffer RankMemory::product(MemoryCategory category, int64_t num_bytes) {
  if (replayed_ != nullptr && !replayed_->empty()) {
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

int64_t RankMemory::moment_bytes(std::size_t idx) const {
  const int64_t num = local_elements(idx);
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
    num += parameters_[i].unit == unit ? local_elements(i) * dp_size_ : 0;
  }
  return num;
}

int64_t RankMemory::unit_bytes(int64_t unit) const {
  int64_t num_bytes = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    num_bytes += parameters_[i].unit == unit ? unsharded_bytes(i) : 0;
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
  if (!spec_.has_deferred_init) {
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
}

void RankMemory::make_optimizer_state() {
  const bool is_torchs = spec_.states == StateFormat::kLikeParameters;
  const int64_t count_bytes = is_torchs ? step_count_bytes(spec_.optimizer) : 4;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameter_buffers_[i].state =
        hold_bytes(MemoryCategory::kOptimizerState,
                   num_moments(spec_.optimizer) * moment_bytes(i) + count_bytes);
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
    } else if (spec_.micro_batches > 1) {
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
  return hold_bytes(MemoryCategory::kGradients, local_bytes(idx));
}

void RankMemory::accumulate(std::size_t idx, Buffer gradient) {
  ParameterBuffers& buffers = parameter_buffers_[idx];
  if (spec_.micro_batches == 1) {
    (dp_size_ > 1 ? buffers.unsharded_gradient : buffers.gradient) = std::move(gradient);
  } else if (dp_size_ > 1 && gathered_bytes(idx) == 2 && spec_.device == DeviceKind::kCpu) {
    // The addition of a half-precision gradient to a float32 sum converts it first.
    hold_bytes(MemoryCategory::kScratch, num_elements(shapes_[idx]) * 4);
  }
  gradient.reset();
  if (dp_size_ == 1 && spec_.steps_in_backward) {
    step_temporaries(local_bytes(idx));
    buffers.gradient.reset();
  }
}

void RankMemory::hold_accumulated_gradients() {
  if (dp_size_ == 1) {
    hold_gradients_of_previous_step();
    return;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameter_buffers_[i].unsharded_gradient =
        hold_bytes(MemoryCategory::kScratch, num_elements(shapes_[i]) * 4);
  }
}

void RankMemory::hold_gradients_of_previous_step() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameter_buffers_[i].gradient = hold_bytes(MemoryCategory::kGradients, local_bytes(i));
  }
}

void RankMemory::hold_staging_of_previous_step() {
  if (dp_size_ == 1) {
    return;
  }
  int64_t most = 0;
  for (std::size_t unit = 0; unit < unsharded_units_.size(); ++unit) {
    most = std::max(most, unit_elements(static_cast<int64_t>(unit)) * 4);
  }
  communicate_data(reduced_staging_bytes(most), false);
  if (axis_size(spec_.mesh, "data_replicate") > 1) {
    const int64_t staging_bytes = to_pages(std::min(most / dp_size_, kMaxStagingBytes));
    hold_staging(replica_staging_, staging_bytes, staging_bytes);
  }
}

// A rank stages the segments of the other ranks, each rounded up to cache lines of 64 bytes.
int64_t RankMemory::reduced_staging_bytes(int64_t num_bytes) const {
  return (std::min(num_bytes, kMaxStagingBytes) / dp_size_ + 63) / 64 * 64 * (dp_size_ - 1);
}

void RankMemory::drop_gradients() {
  for (ParameterBuffers& buffers : parameter_buffers_) {
    buffers.gradient.reset();
  }
}

Buffer RankMemory::step_temporaries(int64_t parameter_bytes) {
  if (spec_.has_fused_optimizer || spec_.states != StateFormat::kLikeParameters ||
      num_moments(spec_.optimizer) == 0 || spec_.optimizer == OptimizerKind::kSgdMomentum) {
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
    divisor = step_temporaries(local_bytes(i));
  }
}

// The parameters are copied out of the buffer into which they are gathered.
void RankMemory::unshard(int64_t unit) {
  if (dp_size_ == 1 || unsharded_units_.at(static_cast<std::size_t>(unit))) {
    return;
  }
  const int64_t num_bytes = unit_bytes(unit);
  const bool is_cast = gathers_in_half() && !has_split_weights_;
  Buffer input = is_cast ? hold_bytes(MemoryCategory::kScratch, num_bytes / dp_size_) : Buffer();
  Buffer gathered = hold_bytes(MemoryCategory::kScratch, num_bytes);
  communicate_data(num_bytes / dp_size_, true);
  input.reset();
  gathered_.reset();
  unsharded_units_.at(static_cast<std::size_t>(unit)) =
      hold_bytes(MemoryCategory::kScratch, num_bytes);
  if (is_forward_) {
    gathered_ = std::move(gathered);
  }
}

void RankMemory::reshard(int64_t unit) {
  unsharded_units_.at(static_cast<std::size_t>(unit)).reset();
}

void RankMemory::forward_ends() {
  gathered_.reset();
  is_forward_ = false;
}

// Gradients are reduced in float32 in every precision.
void RankMemory::reduce_gradients(int64_t unit) {
  if (dp_size_ == 1) {
    return;
  }
  reshard(unit);
  reduced_.reset();
  const int64_t num_bytes = unit_elements(unit) * 4;
  reduced_ = hold_bytes(MemoryCategory::kScratch, num_bytes);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].unit == unit) {
      parameter_buffers_[i].unsharded_gradient.reset();
    }
  }
  communicate_data(reduced_staging_bytes(num_bytes), false);
  // The gradients of a unit are views of one tensor in float32, or copies of them in half
  // precision.
  const bool is_copied = initial_bytes_ == 2 || has_split_weights_;
  Buffer output = is_copied ? hold_bytes(MemoryCategory::kScratch, num_bytes / dp_size_) : Buffer();
  std::vector<Buffer> gradients;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].unit == unit) {
      gradients.push_back(hold_bytes(MemoryCategory::kGradients, local_bytes(i)));
      if (!spec_.steps_in_backward) {
        parameter_buffers_[i].gradient = gradients.back();
      }
    }
  }
  if (spec_.steps_in_backward) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].unit == unit) {
        step_temporaries(local_bytes(i));
        parameter_buffers_[i].gradient.reset();
      }
    }
  }
  if (axis_size(spec_.mesh, "data_replicate") > 1) {  // until the end of the backward
    if (is_copied) {
      averaged_.push_back(std::move(output));
    } else {
      std::move(gradients.begin(), gradients.end(), std::back_inserter(averaged_));
    }
  }
}

void RankMemory::communicate(int64_t num_bytes) {
  if (tp_size_ == 1) {
    return;
  }
  const int64_t staging_bytes = to_pages(std::min(num_bytes, kMaxStagingBytes));
  hold_staging(staging_, staging_bytes, staging_bytes);
}

// A model with a single unit gathers once and reduces once in a step, so that each message always
// uses the same buffer.
void RankMemory::communicate_data(int64_t num_bytes, bool is_gather) {
  const int64_t staging_bytes = to_pages(std::min(num_bytes, kMaxStagingBytes));
  const bool is_alone = unsharded_units_.size() == 1;
  hold_staging(data_staging_,
               is_alone && !is_gather ? 0 : staging_bytes,
               is_alone && is_gather ? 0 : staging_bytes);
}

void RankMemory::communicate_once(int64_t num_bytes) {
  hold_staging(staging_, to_pages(std::min(num_bytes, kMaxStagingBytes)), 0);
}

void RankMemory::hold_staging(Staging& staging, int64_t first_bytes, int64_t second_bytes) {
  const int64_t min_bytes = (spec_.mesh.size() == 1 ? 1 : 3) * kPageBytes;
  const int64_t max_bytes = spec_.mesh.size() == 1 ? min_bytes : kMaxStagingBytes;
  const std::array<int64_t, 2> wanted = {
      std::clamp(first_bytes, std::max(min_bytes, staging.num_bytes[0]), max_bytes),
      std::clamp(second_bytes, std::max(min_bytes, staging.num_bytes[1]), max_bytes)};
  if (wanted != staging.num_bytes) {
    staging.buffer.reset();
    staging.num_bytes = wanted;
    staging.buffer = hold_bytes(MemoryCategory::kCommunication, wanted[0] + wanted[1]);
  }
}

}  // namespace weft::strategy::detail
