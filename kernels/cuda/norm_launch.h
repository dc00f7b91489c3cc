#pragma once

#include "norm_job.h"

#include <c10/core/Device.h>

#include <cstdint>

namespace weft::kernels::cuda {

// launch_norm_forward() and launch_norm_backward() enqueue the job on the current stream of
// `device`. Its pointers must stay valid until it has run; the caching allocator guarantees that
// for tensors that were allocated on that stream. REQUIRES: the job has elements.
void launch_norm_forward(const detail::NormForwardJob& job, c10::Device device);

// Returns the number of blocks that launch_norm_backward uses.
int64_t norm_backward_blocks(const detail::NormBackwardJob& job, c10::Device device);

// `sums` receives the parameters' gradients, scalars [num_params, row_size]; `partial_sums` is
// workspace, scalars [norm_backward_blocks(), num_params, row_size]. Both are null if
// num_params is 0.
void launch_norm_backward(const detail::NormBackwardJob& job,
                          int num_params,
                          void* partial_sums,
                          void* sums,
                          c10::Device device);

}  // namespace weft::kernels::cuda
