#include "optimizer_step_entry.h"

#include <cmath>

namespace weft::kernels::detail {

namespace {

void set_arrays(OptimizerStepJob& job,
                const at::Tensor& parameter,
                const std::optional<at::Tensor>& low_bits,
                const at::Tensor& grad,
                const StepPlace& place) {
  const bool is_float32 = parameter.scalar_type() == at::kFloat;
  job.weight_format = is_float32                              ? WeightFormat::kFloat32
                      : !low_bits.has_value()                 ? WeightFormat::kBFloat16
                      : low_bits->scalar_type() == at::kShort ? WeightFormat::kSplit16
                                                              : WeightFormat::kSplit8;
  job.has_bfloat16_grad = grad.scalar_type() == at::kBFloat16;
  job.num_rows = parameter.dim() < 2 ? 1 : parameter.size(0);
  job.row_size = parameter.numel() / job.num_rows;
  job.row = place.row;
  job.column = place.column;
  job.full_columns = place.full_columns;
  job.seed = static_cast<uint64_t>(place.seed);
  job.step = static_cast<uint64_t>(place.step);
  job.parameter = parameter.mutable_data_ptr();
  job.low_bits = low_bits.has_value() ? low_bits->mutable_data_ptr() : nullptr;
  job.grad = grad.const_data_ptr();
}

StateArray state_array(const at::Tensor& values, const std::optional<at::Tensor>& scale) {
  return {.values = values.mutable_data_ptr(),
          .scales = scale.has_value() ? scale->mutable_data_ptr<float>() : nullptr};
}

// Sets the format of the states. Without scales, rows whose positions are contiguous are one row:
// the step of an element does not depend on its place in a block.
void set_states(OptimizerStepJob& job, const at::Tensor& values) {
  job.state_format = values.scalar_type() == at::kFloat      ? StateFormat::kFloat32
                     : values.scalar_type() == at::kBFloat16 ? StateFormat::kBFloat16
                                                             : StateFormat::kCodes;
  if (job.state_format != StateFormat::kCodes && job.row_size == job.full_columns) {
    job.column = job.row * job.full_columns;
    job.row = 0;
    job.row_size *= job.num_rows;
    job.num_rows = 1;
  }
}

}  // namespace

void check_step_device(const at::Tensor& parameter, c10::DeviceType device) {
  TORCH_CHECK(parameter.device().type() == device,
              "optimizer step got parameter on ",
              parameter.device(),
              " in the kernel for ",
              device,
              "; call the kernel of the tensor's own device.");
}

AdamStepJob adam_step_job(const AdamStep& step) {
  AdamStepJob job{};
  set_arrays(job, step.parameter, step.low_bits, step.grad, step.place);
  set_states(job, step.exp_avg);
  job.first = state_array(step.exp_avg, step.exp_avg_scale);
  job.second = state_array(step.exp_avg_sq, step.exp_avg_sq_scale);
  const auto exponent = static_cast<double>(step.place.step);
  const bool starts_at_grad = 1 - step.beta1 >= 0.5;
  const double decay = step.weight_decay;
  job.constants = {
      .grad_sign = step.maximize ? -1.0F : 1.0F,
      .grad_decay = step.decoupled_weight_decay ? 0.0F : static_cast<float>(decay),
      .parameter_decay =
          step.decoupled_weight_decay ? static_cast<float>(1 - step.lr * decay) : 1.0F,
      .exp_avg_weight = static_cast<float>(starts_at_grad ? -step.beta1 : 1 - step.beta1),
      .starts_at_grad = starts_at_grad ? 1.0F : 0.0F,
      .beta2 = static_cast<float>(step.beta2),
      .exp_avg_sq_weight = static_cast<float>(1 - step.beta2),
      .root_factor = static_cast<float>(1 / std::sqrt(1 - std::pow(step.beta2, exponent))),
      .eps = static_cast<float>(step.eps),
      .step_size = static_cast<float>(step.lr / (1 - std::pow(step.beta1, exponent)))};
  return job;
}

MomentumStepJob momentum_step_job(const MomentumStep& step) {
  MomentumStepJob job{};
  set_arrays(job, step.parameter, step.low_bits, step.grad, step.place);
  set_states(job, step.momentum_buffer);
  job.first = state_array(step.momentum_buffer, step.momentum_scale);
  job.constants = {.grad_sign = step.maximize ? -1.0F : 1.0F,
                   .grad_decay = static_cast<float>(step.weight_decay),
                   .momentum = static_cast<float>(step.momentum),
                   .grad_weight = static_cast<float>(1 - step.dampening),
                   .lr = static_cast<float>(step.lr),
                   .nesterov = step.nesterov ? 1.0F : 0.0F,
                   .is_first = step.place.step == 1 ? 1.0F : 0.0F};
  return job;
}

}  // namespace weft::kernels::detail
