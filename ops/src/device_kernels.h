#pragma once

// Adapts the kernels of one device (kernels/) to the schemas of the operators that run one kernel.
// Inline, because both libweft_ops.so and libweft_ops_cuda.so need the adapters and neither exports
// them.

#include "checked_activation.h"
#include "optimizer_adapters.h"

#include <weft/kernels/activation.h>
#include <weft/kernels/cross_entropy.h>
#include <weft/kernels/dropout.h>
#include <weft/kernels/norm.h>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

namespace weft::ops {

// Returns `tensor`; if it is undefined, an empty tensor of shape [0], which represents an absent or
// unwanted result of an operator.
inline at::Tensor or_empty_tensor(at::Tensor tensor, const at::Tensor& like) {
  return tensor.defined() ? std::move(tensor) : like.new_empty({0});
}

// `Kernels` has the kernels of one device as static members.
template <typename Kernels>
struct KernelAdapters {
  using OptionalTensor = std::optional<at::Tensor>;

  static at::Tensor activation(const at::Tensor& x, std::string_view name) {
    return Kernels::activation_forward(x, checked_activation("weft::_activation", name));
  }

  static std::tuple<at::Tensor, at::Tensor> activation_backward(const at::Tensor& grad,
                                                                const at::Tensor& x,
                                                                std::string_view name) {
    return Kernels::activation_backward(
        grad, x, checked_activation("weft::_activation_backward", name));
  }

  static at::Tensor gated_activation(const at::Tensor& gate,
                                     const at::Tensor& up,
                                     std::string_view name) {
    return Kernels::gated_forward(gate, up, checked_activation("weft::_gated_activation", name));
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_activation_backward(
      const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up, std::string_view name) {
    return Kernels::gated_backward(
        grad, gate, up, checked_activation("weft::_gated_activation_backward", name));
  }

  static at::Tensor gate_up_activation(const at::Tensor& gate_up, std::string_view name) {
    return Kernels::gate_up_forward(gate_up, checked_activation("weft::_gate_up_activation", name));
  }

  static std::tuple<at::Tensor, at::Tensor> gate_up_activation_backward(const at::Tensor& grad,
                                                                        const at::Tensor& gate_up,
                                                                        std::string_view name) {
    return Kernels::gate_up_backward(
        grad, gate_up, checked_activation("weft::_gate_up_activation_backward", name));
  }

  static at::Tensor dropout_of_shard(const at::Tensor& x,
                                     std::int64_t seed,
                                     double p,
                                     std::int64_t inner,
                                     std::int64_t size,
                                     std::int64_t begin,
                                     std::int64_t full_size) {
    return Kernels::dropout(
        x, p, static_cast<std::uint64_t>(seed), {inner, size, begin, full_size});
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm(
      const at::Tensor& x,
      const OptionalTensor& residual,
      const OptionalTensor& weight,
      const OptionalTensor& bias,
      bool centered,
      double eps) {
    auto result = Kernels::norm_forward(
        {.x = x, .residual = residual, .weight = weight, .bias = bias, .eps = eps},
        centered ? kernels::Norm::kLayer : kernels::Norm::kRms);
    return {result.y,
            or_empty_tensor(result.sum, x),
            or_empty_tensor(result.mean, result.rstd),
            result.rstd};
  }

  // `mean` is [0] unless `centered`. `num_params`: 0, 1 (the gradient of weight is wanted) or 2
  // (those of weight and bias).
  static std::tuple<at::Tensor, at::Tensor> norm_backward(const at::Tensor& grad_y,
                                                          const OptionalTensor& grad_sum,
                                                          const at::Tensor& norm_input,
                                                          const OptionalTensor& weight,
                                                          const at::Tensor& mean,
                                                          const at::Tensor& rstd,
                                                          bool centered,
                                                          bool wants_input,
                                                          std::int64_t num_params) {
    const auto row_mean = centered ? OptionalTensor(mean) : std::nullopt;
    auto gradients = Kernels::norm_backward(
        grad_y,
        grad_sum,
        {.norm_input = norm_input, .weight = weight, .mean = row_mean, .rstd = rstd},
        {.input = wants_input, .params = num_params > 0, .bias = num_params > 1});
    return {or_empty_tensor(gradients.input, norm_input),
            or_empty_tensor(gradients.params, weight.value_or(norm_input))};
  }

  static at::Tensor cross_entropy_statistics(const at::Tensor& logits,
                                             const at::Tensor& target,
                                             std::int64_t vocab_start,
                                             std::int64_t ignore_index,
                                             bool wants_sum) {
    return Kernels::cross_entropy_statistics({.logits = logits,
                                              .target = target,
                                              .vocab_start = vocab_start,
                                              .ignore_index = ignore_index,
                                              .wants_sum = wants_sum});
  }

  static void cross_entropy_gradient(const at::Tensor& grad_logits,
                                     const at::Tensor& grad_losses,
                                     const at::Tensor& logits,
                                     const at::Tensor& target,
                                     const at::Tensor& normalizers,
                                     std::int64_t vocab_start,
                                     std::int64_t num_classes,
                                     std::int64_t ignore_index,
                                     double label_smoothing) {
    Kernels::cross_entropy_gradient({.grad_losses = grad_losses,
                                     .logits = logits,
                                     .target = target,
                                     .normalizers = normalizers,
                                     .vocab_start = vocab_start,
                                     .num_classes = num_classes,
                                     .ignore_index = ignore_index,
                                     .label_smoothing = label_smoothing},
                                    grad_logits);
  }

  static void register_kernels(torch::Library& m) {
    m.impl("_activation", TORCH_FN(activation));
    m.impl("_activation_backward", TORCH_FN(activation_backward));
    m.impl("_gated_activation", TORCH_FN(gated_activation));
    m.impl("_gated_activation_backward", TORCH_FN(gated_activation_backward));
    m.impl("_gate_up_activation", TORCH_FN(gate_up_activation));
    m.impl("_gate_up_activation_backward", TORCH_FN(gate_up_activation_backward));
    m.impl("_dropout_of_shard", TORCH_FN(dropout_of_shard));
    m.impl("_norm", TORCH_FN(norm));
    m.impl("_norm_backward", TORCH_FN(norm_backward));
    m.impl("_cross_entropy_statistics", TORCH_FN(cross_entropy_statistics));
    m.impl("_cross_entropy_gradient", TORCH_FN(cross_entropy_gradient));
    OptimizerStepAdapters<Kernels>::register_steps(m);
    register_float_codes<Kernels>(m);
  }
};

}  // namespace weft::ops
