#include "emulated_kernels.h"

#include "activation_entry.h"
#include "activation_launch.h"
#include "cross_entropy_entry.h"
#include "cross_entropy_launch.h"
#include "dropout_entry.h"
#include "dropout_launch.h"
#include "norm_entry.h"
#include "norm_launch.h"

#include <ATen/ops/empty.h>

namespace weft::kernels::emulated {
namespace {

// Tensors are in the CPU's memory, which is the memory of the emulated device.
struct EmulatedDevice {
  static constexpr c10::DeviceType kType = c10::DeviceType::CPU;

  static at::Tensor empty(at::IntArrayRef sizes, const at::Tensor& like) {
    return at::empty(sizes, like.options());
  }

  static at::Tensor params(const at::Tensor& params, at::ScalarType /*scalar*/) { return params; }

  static void run(const detail::ActivationJob& job, c10::Device device) {
    cuda::launch_activation(job, device);
  }

  static void run(const detail::CrossEntropyStatisticsJob& job, c10::Device device) {
    cuda::launch_cross_entropy_statistics(job, device);
  }

  static void run(const detail::CrossEntropyGradientJob& job, c10::Device device) {
    cuda::launch_cross_entropy_gradient(job, device);
  }

  static void run(const detail::DropoutJob& job, c10::Device device) {
    cuda::launch_dropout(job, device);
  }

  static void run(const detail::NormForwardJob& job, c10::Device device) {
    cuda::launch_norm_forward(job, device);
  }

  static at::Tensor run(const detail::NormBackwardJob& job,
                        int num_params,
                        const at::TensorOptions& options) {
    const c10::Device device = options.device();
    if (num_params == 0) {
      cuda::launch_norm_backward(job, 0, nullptr, nullptr, device);
      return {};
    }
    const at::Tensor partial_sums =
        at::empty({cuda::norm_backward_blocks(job, device), num_params, job.row_size}, options);
    at::Tensor sums = at::empty({num_params, job.row_size}, options);
    cuda::launch_norm_backward(
        job, num_params, partial_sums.mutable_data_ptr(), sums.mutable_data_ptr(), device);
    return sums;
  }
};

using Activations = detail::ActivationEntry<EmulatedDevice>;
using CrossEntropies = detail::CrossEntropyEntry<EmulatedDevice>;
using Norms = detail::NormEntry<EmulatedDevice>;

}  // namespace

at::Tensor activation_forward(const at::Tensor& x, Activation activation) {
  return Activations::forward(x, activation);
}

std::tuple<at::Tensor, at::Tensor> activation_backward(const at::Tensor& grad_h,
                                                       const at::Tensor& x,
                                                       Activation activation) {
  return Activations::backward(grad_h, x, activation);
}

at::Tensor gated_forward(const at::Tensor& gate, const at::Tensor& up, Activation activation) {
  return Activations::gated_forward(gate, up, activation);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_backward(const at::Tensor& grad_h,
                                                              const at::Tensor& gate,
                                                              const at::Tensor& up,
                                                              Activation activation) {
  return Activations::gated_backward(grad_h, gate, up, activation);
}

at::Tensor gate_up_forward(const at::Tensor& gate_up, Activation activation) {
  return Activations::gate_up_forward(gate_up, activation);
}

std::tuple<at::Tensor, at::Tensor> gate_up_backward(const at::Tensor& grad_h,
                                                    const at::Tensor& gate_up,
                                                    Activation activation) {
  return Activations::gate_up_backward(grad_h, gate_up, activation);
}

at::Tensor cross_entropy_statistics(const CrossEntropyStatisticsArguments& arguments) {
  return CrossEntropies::statistics(arguments);
}

void cross_entropy_gradient(const CrossEntropyGradientArguments& arguments,
                            const at::Tensor& grad_logits) {
  CrossEntropies::gradient(arguments, grad_logits);
}

NormResult norm_forward(const NormArguments& arguments, Norm norm) {
  return Norms::forward(arguments, norm);
}

NormGradients norm_backward(const at::Tensor& grad_y,
                            const std::optional<at::Tensor>& grad_sum,
                            const NormSaved& saved,
                            NormWanted wanted) {
  return Norms::backward(grad_y, grad_sum, saved, wanted);
}

at::Tensor dropout(const at::Tensor& x, double p, uint64_t seed, const DropoutPlace& place) {
  return detail::run_dropout<EmulatedDevice>(x, p, seed, place);
}

}  // namespace weft::kernels::emulated
