#pragma once

#include "norm_job.h"

#include <c10/core/Device.h>

#include <cstdint>

namespace weft::kernels::cuda {

// Enqueue the job on the current stream of `device`. Pointers must stay valid until it ran, which
// the caching allocator sees to for tensors used on that stream.
// REQUIRES: the job has elements.
void launch_norm_forward(const detail::NormForwardJob& job, c10::Device device);

// How many blocks launch_norm_backward uses.
int64_t norm_backward_blocks(const detail::NormBackwardJob& job, c10::Device device);

// `partial_sums`: scalars [norm_backward_blocks(), num_params, row_size], and `sums`
// [num_params, row_size]: of the parameters' gradients; both null for num_params 0.
void launch_norm_backward(const detail::NormBackwardJob& job,
                          int num_params,
                          void* partial_sums,
                          void* sums,
                          c10::Device device);

}  // namespace weft::kernels::cuda
