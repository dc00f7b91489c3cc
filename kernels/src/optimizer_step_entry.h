#pragma once

#include "optimizer_step_job.h"

#include <weft/kernels/optimizer_step.h>

// Checks tensors and builds the jobs of the optimizer steps, for all devices. `Device` supplies
// kType, run(const AdamStepJob& job, c10::Device device) and the same for MomentumStepJob, for jobs
// with elements.
namespace weft::kernels::detail {

// Throws c10::Error if the parameter is not on a device of type `device`.
void check_step_device(const at::Tensor& parameter, c10::DeviceType device);

// Return the job of a step whose arguments are checked and have elements.
AdamStepJob adam_step_job(const AdamStep& step);
MomentumStepJob momentum_step_job(const MomentumStep& step);

template <typename Device>
struct OptimizerStepEntry {
  static void adam_step(const AdamStep& step) {
    check_adam_step(step);
    check_step_device(step.parameter, Device::kType);
    if (step.parameter.numel() > 0) Device::run(adam_step_job(step), step.parameter.device());
  }

  static void momentum_step(const MomentumStep& step) {
    check_momentum_step(step);
    check_step_device(step.parameter, Device::kType);
    if (step.parameter.numel() > 0) Device::run(momentum_step_job(step), step.parameter.device());
  }
};

}  // namespace weft::kernels::detail
