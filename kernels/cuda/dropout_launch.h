#pragma once

#include "dropout_job.h"

#include <c10/core/Device.h>

namespace weft::kernels::cuda {

// Enqueues the job on the current stream of `device`. Its pointers must stay valid until it has
// run; the caching allocator guarantees that for tensors that were allocated on that stream.
// REQUIRES: job.num_elements > 0.
void launch_dropout(const detail::DropoutJob& job, c10::Device device);

}  // namespace weft::kernels::cuda
