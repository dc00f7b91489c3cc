#pragma once

#include "activation_job.h"
#include "entry.h"

#include <weft/kernels/activation_kind.h>

#include <ATen/core/Tensor.h>

#include <tuple>

// Checks tensors and builds an ActivationJob, for all devices. `Device` supplies:
//
//   struct Device {
//     static constexpr c10::DeviceType kType;
//     static at::Tensor empty_like(const at::Tensor& like);  // contiguous
//     static void run(const ActivationJob& job, c10::Device device);  // job.num_elements > 0
//   };
namespace weft::kernels::detail {

// The arguments of one call, borrowed; `x` is the gate of the gated operations.
struct ActivationOperands {
  const char* function;  // the name of the called function, for errors
  const at::Tensor& x;
  const at::Tensor* up = nullptr;
  const at::Tensor* grad_h = nullptr;
};

// Throws c10::Error if an operand is undefined, if operands differ in shape, dtype or device, if
// the dtype is not supported, or if the operands are not on the type of device `device`.
void check_operands(const ActivationOperands& operands, c10::DeviceType device);

struct ActivationResults {
  at::Tensor h;
  at::Tensor grad_x;
  at::Tensor grad_up;
};

template <typename Device>
ActivationResults run_operands(const ActivationOperands& operands,
                               ActivationOp op,
                               Activation activation) {
  check_operands(operands, Device::kType);
  const at::Tensor& x = operands.x;
  ActivationResults results{.h = Device::empty_like(x), .grad_x = {}, .grad_up = {}};
  if (operands.grad_h != nullptr) {
    results.grad_x = Device::empty_like(x);
    if (operands.up != nullptr) results.grad_up = Device::empty_like(x);
  }
  if (x.numel() == 0) return results;

  const ContiguousOperand contiguous_x(&x);
  const ContiguousOperand up(operands.up);
  const ContiguousOperand grad_h(operands.grad_h);
  const auto writable = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
  };
  Device::run(
      {
          .op = op,
          .activation = activation,
          .type = storage_type(x.scalar_type()),
          .num_elements = x.numel(),
          .grad_h = grad_h.data(),
          .x = contiguous_x.data(),
          .up = up.data(),
          .h = writable(results.h),
          .grad_x = writable(results.grad_x),
          .grad_up = writable(results.grad_up),
      },
      x.device());
  return results;
}

template <typename Device>
struct ActivationEntry {
  static at::Tensor forward(const at::Tensor& x, Activation activation) {
    return run_operands<Device>(
               {.function = "activation_forward", .x = x}, ActivationOp::kForward, activation)
        .h;
  }

  static std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& grad_h,
                                                     const at::Tensor& x,
                                                     Activation activation) {
    auto results =
        run_operands<Device>({.function = "activation_backward", .x = x, .grad_h = &grad_h},
                             ActivationOp::kBackward,
                             activation);
    return {std::move(results.grad_x), std::move(results.h)};
  }

  static at::Tensor gated_forward(const at::Tensor& gate,
                                  const at::Tensor& up,
                                  Activation activation) {
    return run_operands<Device>({.function = "gated_forward", .x = gate, .up = &up},
                                ActivationOp::kGatedForward,
                                activation)
        .h;
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_backward(const at::Tensor& grad_h,
                                                                       const at::Tensor& gate,
                                                                       const at::Tensor& up,
                                                                       Activation activation) {
    auto results = run_operands<Device>(
        {.function = "gated_backward", .x = gate, .up = &up, .grad_h = &grad_h},
        ActivationOp::kGatedBackward,
        activation);
    return {std::move(results.grad_x), std::move(results.grad_up), std::move(results.h)};
  }
};

}  // namespace weft::kernels::detail
