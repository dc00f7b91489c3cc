#pragma once

#include "activation_launch.h"
#include "cross_entropy_launch.h"
#include "dropout_launch.h"
#include "norm_launch.h"
#include "optimizer_step_launch.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace weft::kernels::cuda {

// The `Device` of the entries in kernels/src: runs their jobs by the launches of this folder.
// `type` is that of the tensors: CUDA, or CPU on the emulator, whose device memory is the host's.
template <c10::DeviceType type>
struct LaunchDevice {
  static constexpr c10::DeviceType kType = type;

  static at::Tensor empty(at::IntArrayRef sizes, const at::Tensor& like) {
    return at::empty(sizes, like.options());
  }

  // The kernels convert bfloat16 and float16 parameters themselves.
  static at::Tensor params(const at::Tensor& params, at::ScalarType /*compute_type*/) {
    return params;
  }

  static void run(const detail::ActivationJob& job, c10::Device device) {
    launch_activation(job, device);
  }

  static void run(const detail::CrossEntropyStatisticsJob& job, c10::Device device) {
    launch_cross_entropy_statistics(job, device);
  }

  static void run(const detail::CrossEntropyGradientJob& job, c10::Device device) {
    launch_cross_entropy_gradient(job, device);
  }

  static void run(const detail::DropoutJob& job, c10::Device device) {
    launch_dropout(job, device);
  }

  static void run(const detail::AdamStepJob& job, c10::Device device) {
    launch_adam_step(job, device);
  }

  static void run(const detail::MomentumStepJob& job, c10::Device device) {
    launch_momentum_step(job, device);
  }

  static void run(const detail::FloatCodesJob& job, c10::Device device) {
    launch_float_codes(job, device);
  }

  static void run(const detail::NormForwardJob& job, c10::Device device) {
    launch_norm_forward(job, device);
  }

  static at::Tensor run(const detail::NormBackwardJob& job,
                        int num_params,
                        const at::TensorOptions& options) {
    const c10::Device device = options.device();
    if (num_params == 0) {
      launch_norm_backward(job, 0, nullptr, nullptr, device);
      return {};
    }
    const at::Tensor partial_sums =
        at::empty({norm_backward_blocks(job, device), num_params, job.row_size}, options);
    at::Tensor sums = at::empty({num_params, job.row_size}, options);
    launch_norm_backward(
        job, num_params, partial_sums.mutable_data_ptr(), sums.mutable_data_ptr(), device);
    return sums;
  }
};

using CudaDevice = LaunchDevice<c10::DeviceType::CUDA>;

}  // namespace weft::kernels::cuda
