#include "machine.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace weft::strategy::detail {

namespace {

// The shared-memory backend uses two chunks of at most this size, and two pages at least.
constexpr int64_t kMaxPieceBytes = int64_t{1} << 20;
constexpr int64_t kPageBytes = 4096;

// The bytes of a gradient that exist at a time if weights are stepped by rows (row_steps.py).
constexpr int64_t kRowsBytes = int64_t{1} << 20;

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

// A float32 tensor of one element counts the steps of each parameter.
int64_t step_count_bytes(OptimizerKind optimizer) {
  const bool has_momentum_only =
      optimizer == OptimizerKind::kSgd || optimizer == OptimizerKind::kSgdMomentum;
  return has_momentum_only ? 0 : 4;
}

Machine::Machine(const TrainingSpec& spec, int64_t global_rank, Timeline& timeline)
    : spec_(spec),
      timeline_(timeline),
      styles_(resolve_styles(spec)),
      parameters_(parameters_of(spec.model, styles_)),
      held_(parameters_.size()),
      tp_size_(axis_size(spec.mesh, "tensor_parallel")),
      dp_size_(axis_size(spec.mesh, "data_parallel")),
      activation_bytes_(spec.precision == Precision::k32True ? 4 : 2),
      wide_bytes_(spec.precision == Precision::kHalfTrue ? 2 : 4),
      parameter_bytes_(spec.precision == Precision::kHalfTrue ? 2 : 4) {
  const int64_t tp_rank = coordinate(spec.mesh, "tensor_parallel", global_rank);
  int64_t num_units = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    shapes_.push_back(tensor_parallel_shape(parameters_[i], tp_size_, tp_rank));
    by_module_[parameters_[i].module].push_back(i);
    num_units = std::max(num_units, parameters_[i].unit + 1);
  }
  unsharded_.resize(static_cast<std::size_t>(num_units));
}

Buffer Machine::product(MemoryCategory category, int64_t num_bytes) {
  if (replayed_ != nullptr && !replayed_->empty()) {
    Buffer kept = std::move(replayed_->front());
    replayed_->pop_front();
    return kept;
  }
  if (recorded_ != nullptr) {
    recorded_->push_back(hold_bytes(MemoryCategory::kSavedActivations, num_bytes));
    return recorded_->back();
  }
  return hold_bytes(replayed_ != nullptr ? MemoryCategory::kScratch : category, num_bytes);
}

int64_t Machine::weight_dim(const std::string& module, std::size_t dim) const {
  return shapes_[by_module_.at(module).front()].at(dim);
}

const ModuleStyle& Machine::style(const std::string& module) const {
  static const ModuleStyle kNone;
  const auto found = styles_.find(module);
  return found == styles_.end() ? kNone : found->second;
}

// FSDP2 pads every rank's rows to those of the first.
int64_t Machine::local_bytes(std::size_t idx) const {
  const auto& shape = shapes_[idx];
  if (dp_size_ == 1) {
    return num_elements(shape) * parameter_bytes_;
  }
  const int64_t rows = (shape.front() + dp_size_ - 1) / dp_size_;
  return shape.front() == 0 ? 0 : num_elements(shape) / shape.front() * rows * parameter_bytes_;
}

int64_t Machine::unsharded_bytes(std::size_t idx) const {
  return num_elements(shapes_[idx]) * parameter_bytes_;
}

int64_t Machine::unit_bytes(int64_t unit) const {
  int64_t num_bytes = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    num_bytes += parameters_[i].unit == unit ? unsharded_bytes(i) : 0;
  }
  return num_bytes;
}

int64_t Machine::all_local_bytes() const {
  int64_t num_bytes = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    num_bytes += local_bytes(i);
  }
  return num_bytes;
}

void Machine::initialize() {
  buffers_ = hold_bytes(MemoryCategory::kParameters, num_buffer_elements(spec_.model) * 4);
  communicate(0);
  std::vector<Buffer> whole(parameters_.size());
  if (!spec_.has_deferred_init) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      whole[i] = hold_bytes(MemoryCategory::kParameters,
                            num_elements(parameters_[i].shape) * parameter_bytes_);
    }
    if (tp_size_ * dp_size_ == 1) {
      for (std::size_t i = 0; i < parameters_.size(); ++i) {
        held_[i].parameter = std::move(whole[i]);
      }
      return;
    }
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool is_cut = dp_size_ > 1 || (tp_size_ > 1 && parameters_[i].shard_dim);
    held_[i].parameter =
        whole[i] && !is_cut ? whole[i] : hold_bytes(MemoryCategory::kParameters, local_bytes(i));
    whole[i].reset();
  }
}

void Machine::make_optimizer_state() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    held_[i].state = hold_bytes(
        MemoryCategory::kOptimizerState,
        num_moments(spec_.optimizer) * local_bytes(i) + step_count_bytes(spec_.optimizer));
  }
}

void Machine::make_gradients(const std::string& module) {
  for (const std::size_t idx : by_module_.at(module)) {
    if (dp_size_ > 1) {
      held_[idx].unsharded_gradient = hold_bytes(MemoryCategory::kScratch, unsharded_bytes(idx));
    } else {
      complete(idx);
    }
  }
}

void Machine::make_mlp_gradients(const std::string& module) {
  if (!spec_.steps_by_rows) {
    make_gradients(module);
    return;
  }
  for (const std::size_t idx : by_module_.at(module)) {
    shapes_[idx].size() == 2 ? step_by_rows(idx) : complete(idx);
  }
}

int64_t Machine::rows_at_once(const std::string& module) const {
  const auto& shape = shapes_[by_module_.at(module).front()];
  if (!spec_.steps_by_rows) {
    return shape[0];
  }
  const int64_t row_bytes = std::max<int64_t>(1, shape[1] * parameter_bytes_);
  return std::min(shape[0], std::max<int64_t>(1, kRowsBytes / row_bytes));
}

void Machine::step_by_rows(std::size_t idx) {
  const int64_t num = rows_at_once(parameters_[idx].module) * shapes_[idx][1];
  const Buffer product = scratch(num);
  const bool is_cast = activation_bytes_ != parameter_bytes_;
  const Buffer gradient =
      is_cast ? hold_bytes(MemoryCategory::kScratch, num * parameter_bytes_) : Buffer();
  step_temporaries(num * parameter_bytes_);
}

Buffer Machine::weight_sized(const std::string& module) {
  int64_t num_bytes = 0;
  for (const std::size_t idx : by_module_.at(module)) {
    num_bytes += unsharded_bytes(idx);
  }
  return hold_bytes(MemoryCategory::kScratch, num_bytes);
}

void Machine::complete(std::size_t idx) {
  held_[idx].gradient = hold_bytes(MemoryCategory::kGradients, local_bytes(idx));
  if (spec_.steps_in_backward) {
    step_temporaries(local_bytes(idx));
    held_[idx].gradient.reset();
  }
}

void Machine::make_all_gradients() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    held_[i].gradient = hold_bytes(MemoryCategory::kGradients, local_bytes(i));
  }
}

void Machine::drop_gradients() {
  for (Held& held : held_) {
    held.gradient.reset();
  }
}

Buffer Machine::step_temporaries(int64_t parameter_bytes) {
  if (spec_.has_fused_optimizer || num_moments(spec_.optimizer) == 0 ||
      spec_.optimizer == OptimizerKind::kSgdMomentum) {
    return {};
  }
  Buffer root = hold_bytes(MemoryCategory::kScratch, parameter_bytes);
  if (spec_.optimizer == OptimizerKind::kAdagrad) {
    return root;
  }
  return hold_bytes(MemoryCategory::kScratch, parameter_bytes);  // the root, corrected
}

void Machine::step() {
  if (spec_.steps_in_backward) {
    return;
  }
  Buffer divisor;  // of the parameter before, until that of the next is there
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    divisor = step_temporaries(local_bytes(i));
  }
}

// The gathered buffer and the parameters copied out of it, together for a moment.
void Machine::gather(int64_t unit) {
  if (dp_size_ == 1 || unsharded_.at(static_cast<std::size_t>(unit))) {
    return;
  }
  const int64_t num_bytes = unit_bytes(unit);
  const Buffer input = hold_bytes(MemoryCategory::kScratch, num_bytes / dp_size_);
  const Buffer gathered = hold_bytes(MemoryCategory::kScratch, num_bytes);
  communicate(num_bytes / dp_size_);
  unsharded_.at(static_cast<std::size_t>(unit)) = hold_bytes(MemoryCategory::kScratch, num_bytes);
}

void Machine::release(int64_t unit) { unsharded_.at(static_cast<std::size_t>(unit)).reset(); }

void Machine::reduce_gradients(int64_t unit) {
  if (dp_size_ == 1) {
    return;
  }
  release(unit);
  const int64_t num_bytes = unit_bytes(unit);
  {
    const Buffer input = hold_bytes(MemoryCategory::kScratch, num_bytes);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].unit == unit) {
        held_[i].unsharded_gradient.reset();
      }
    }
    const Buffer output = hold_bytes(MemoryCategory::kScratch, num_bytes / dp_size_);
    // What goes to the other ranks, in whole cache lines.
    const int64_t part = (std::min(num_bytes, kMaxPieceBytes) / dp_size_ + 63) / 64 * 64;
    communicate(part * (dp_size_ - 1));
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].unit == unit) {
      complete(i);
    }
  }
}

void Machine::communicate(int64_t num_bytes) {
  const int64_t piece = to_pages(std::min(num_bytes, kMaxPieceBytes));
  hold_staging(piece, piece);
}

void Machine::communicate_once(int64_t num_bytes) {
  hold_staging(to_pages(std::min(num_bytes, kMaxPieceBytes)), 0);
}

void Machine::hold_staging(int64_t first_bytes, int64_t second_bytes) {
  const int64_t least = (spec_.mesh.size() == 1 ? 1 : 3) * kPageBytes;
  const int64_t most = spec_.mesh.size() == 1 ? least : kMaxPieceBytes;
  const std::array<int64_t, 2> wanted = {
      std::clamp(first_bytes, std::max(least, staging_bytes_[0]), most),
      std::clamp(second_bytes, std::max(least, staging_bytes_[1]), most)};
  if (wanted != staging_bytes_) {
    staging_.reset();
    staging_bytes_ = wanted;
    staging_ = hold_bytes(MemoryCategory::kCommunication, wanted[0] + wanted[1]);
  }
}

void Machine::copy_weights() {
  if (spec_.precision == Precision::kHalfMixed) {
    weight_copies_ = hold_bytes(MemoryCategory::kScratch, all_local_bytes() / 2);
  }
}

void Machine::copy_gradients() {
  if (spec_.precision == Precision::kHalfMixed) {
    gradient_copies_ = hold_bytes(MemoryCategory::kScratch, all_local_bytes() / 2);
  }
}

void Machine::drop_copies() {
  weight_copies_.reset();
  gradient_copies_.reset();
}

}  // namespace weft::strategy::detail
