#pragma once

#include "float_codes_job.h"
#include "optimizer_step_job.h"

#include <c10/core/Device.h>

namespace weft::kernels::cuda {

// Enqueue the job on the current stream of `device`. Its pointers must stay valid until it has run;
// the caching allocator guarantees that for tensors that were allocated on that stream. A step
// throws c10::Error while a CUDA graph is captured.
// REQUIRES: the job has elements.
void launch_adam_step(const detail::AdamStepJob& job, c10::Device device);
void launch_momentum_step(const detail::MomentumStepJob& job, c10::Device device);
void launch_float_codes(const detail::FloatCodesJob& job, c10::Device device);

}  // namespace weft::kernels::cuda
