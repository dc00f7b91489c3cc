// The activations on CUDA as registered operators; kernels/cuda computes them.

#include "checked_activation.h"

#include <weft/kernels/activation.h>

#include <torch/library.h>

#include <string_view>
#include <tuple>

namespace weft::ops {

namespace {

at::Tensor activation(const at::Tensor& x, std::string_view name) {
  return kernels::cuda::activation_forward(x, checked_activation("weft::_activation", name));
}

std::tuple<at::Tensor, at::Tensor> activation_backward(const at::Tensor& grad,
                                                       const at::Tensor& x,
                                                       std::string_view name) {
  return kernels::cuda::activation_backward(
      grad, x, checked_activation("weft::_activation_backward", name));
}

at::Tensor gated_activation(const at::Tensor& gate, const at::Tensor& up, std::string_view name) {
  return kernels::cuda::gated_forward(
      gate, up, checked_activation("weft::_gated_activation", name));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_activation_backward(const at::Tensor& grad,
                                                                         const at::Tensor& gate,
                                                                         const at::Tensor& up,
                                                                         std::string_view name) {
  return kernels::cuda::gated_backward(
      grad, gate, up, checked_activation("weft::_gated_activation_backward", name));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("_activation", TORCH_FN(activation));
  m.impl("_activation_backward", TORCH_FN(activation_backward));
  m.impl("_gated_activation", TORCH_FN(gated_activation));
  m.impl("_gated_activation_backward", TORCH_FN(gated_activation_backward));
}

}  // namespace weft::ops
