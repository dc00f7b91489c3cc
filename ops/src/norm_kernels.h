#pragma once

// _norm and _norm_backward on top of the kernels of one device. Inline, because both
// libweft_ops.so and libweft_ops_cuda.so need it and neither exports it.

#include <weft/kernels/norm.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

namespace weft::ops {

// Registered operators return absent results as [0].
inline at::Tensor or_empty_tensor(at::Tensor tensor, const at::Tensor& like) {
  return tensor.defined() ? std::move(tensor) : like.new_empty({0});
}

template <auto kForward, auto kBackward>
struct NormKernels {
  using OptionalTensor = std::optional<at::Tensor>;

  static std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward(
      const at::Tensor& x,
      const OptionalTensor& residual,
      const OptionalTensor& weight,
      const OptionalTensor& bias,
      bool centered,
      double eps) {
    auto result =
        kForward({.x = x, .residual = residual, .weight = weight, .bias = bias, .eps = eps},
                 centered ? kernels::Norm::kLayer : kernels::Norm::kRms);
    return {result.y,
            or_empty_tensor(result.sum, x),
            or_empty_tensor(result.mean, result.rstd),
            result.rstd};
  }

  static std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& grad_y,
                                                     const OptionalTensor& grad_sum,
                                                     const at::Tensor& v,
                                                     const OptionalTensor& weight,
                                                     const at::Tensor& mean,
                                                     const at::Tensor& rstd,
                                                     bool centered,
                                                     bool wants_input,
                                                     std::int64_t num_params) {
    const auto row_mean = centered ? OptionalTensor(mean) : std::nullopt;
    auto gradients =
        kBackward(grad_y,
                  grad_sum,
                  {.v = v, .weight = weight, .mean = row_mean, .rstd = rstd},
                  {.input = wants_input, .params = num_params > 0, .bias = num_params > 1});
    return {or_empty_tensor(gradients.input, v),
            or_empty_tensor(gradients.params, weight.value_or(v))};
  }
};

}  // namespace weft::ops
