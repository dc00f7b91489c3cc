#pragma once

#include "cross_entropy_job.h"

#include <c10/core/Device.h>

namespace weft::kernels::cuda {

// Enqueue the job on the current stream of `device`. Its pointers must stay valid until it has run;
// the caching allocator guarantees that for tensors that were allocated on that stream.
// REQUIRES: the statistics job has rows, the gradient job has elements.
void launch_cross_entropy_statistics(const detail::CrossEntropyStatisticsJob& job,
                                     c10::Device device);
void launch_cross_entropy_gradient(const detail::CrossEntropyGradientJob& job, c10::Device device);

}  // namespace weft::kernels::cuda
