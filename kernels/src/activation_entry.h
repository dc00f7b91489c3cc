#pragma once

#include "activation_job.h"
#include "entry.h"

#include <weft/kernels/activation_kind.h>

#include <ATen/DimVector.h>
#include <ATen/core/Tensor.h>

#include <tuple>

// Checks tensors and builds an ActivationJob, for all devices. `Device` supplies:
//
//   struct Device {
//     static constexpr c10::DeviceType kType;
//     // Contiguous, with the dtype and device of `like`.
//     static at::Tensor empty(at::IntArrayRef sizes, const at::Tensor& like);
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

// The same checks for gate_up [..., 2 * hidden] and, unless null, grad_h [..., hidden]. Returns the
// sizes of h, [..., hidden].
at::DimVector check_gate_up(const char* function,
                            const at::Tensor& gate_up,
                            const at::Tensor* grad_h,
                            c10::DeviceType device);

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
  ActivationResults results{.h = Device::empty(x.sizes(), x), .grad_x = {}, .grad_up = {}};
  if (operands.grad_h != nullptr) {
    results.grad_x = Device::empty(x.sizes(), x);
    if (operands.up != nullptr) results.grad_up = Device::empty(x.sizes(), x);
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

// Returns (h, grad_gate_up); grad_gate_up is undefined if `grad_h` is null.
template <typename Device>
std::tuple<at::Tensor, at::Tensor> run_gate_up(const char* function,
                                               const at::Tensor& gate_up,
                                               const at::Tensor* grad_h,
                                               Activation activation) {
  const auto h_sizes = check_gate_up(function, gate_up, grad_h, Device::kType);
  at::Tensor h = Device::empty(h_sizes, gate_up);
  at::Tensor grad_gate_up;
  if (grad_h != nullptr) grad_gate_up = Device::empty(gate_up.sizes(), gate_up);
  if (h.numel() == 0) return {std::move(h), std::move(grad_gate_up)};

  const ContiguousOperand contiguous_gate_up(&gate_up);
  const ContiguousOperand contiguous_grad_h(grad_h);
  const int64_t row_size = h_sizes.back();
  const auto row_bytes = row_size * static_cast<int64_t>(gate_up.element_size());
  const auto* gate = static_cast<const char*>(contiguous_gate_up.data());
  auto* grad_gate =
      grad_h == nullptr ? nullptr : static_cast<char*>(grad_gate_up.mutable_data_ptr());
  Device::run(
      {
          .op = grad_h == nullptr ? ActivationOp::kGatedForward : ActivationOp::kGatedBackward,
          .activation = activation,
          .type = storage_type(gate_up.scalar_type()),
          .num_elements = h.numel(),
          .row_size = row_size,
          .grad_h = contiguous_grad_h.data(),
          .x = gate,
          .up = gate + row_bytes,
          .h = h.mutable_data_ptr(),
          .grad_x = grad_gate,
          .grad_up = grad_gate == nullptr ? nullptr : grad_gate + row_bytes,
      },
      gate_up.device());
  return {std::move(h), std::move(grad_gate_up)};
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

  static at::Tensor gate_up_forward(const at::Tensor& gate_up, Activation activation) {
    return std::get<0>(run_gate_up<Device>("gate_up_forward", gate_up, nullptr, activation));
  }

  static std::tuple<at::Tensor, at::Tensor> gate_up_backward(const at::Tensor& grad_h,
                                                             const at::Tensor& gate_up,
                                                             Activation activation) {
    auto [h, grad_gate_up] = run_gate_up<Device>("gate_up_backward", gate_up, &grad_h, activation);
    return {std::move(grad_gate_up), std::move(h)};
  }
};

}  // namespace weft::kernels::detail
