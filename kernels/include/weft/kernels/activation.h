#pragma once

#include <weft/kernels/activation_kind.h>

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

// The elementwise operations of an MLP, each one pass over memory.
//
// Shapes: x, gate, up, grad_h are [..., f], all of one shape; a bias is [f] and is added over the
// last dim. Any strides are read; results are contiguous, in the shape and dtype of the input.
// Dtypes: float32, float64, bfloat16, float16, the same for all arguments. Half types are computed
// in float32 per element and rounded once.
// Errors: c10::Error when shapes, dtypes or devices disagree, before anything is allocated.
//
// Results for NaN and infinity are those of torch's operators in float64. The gradient of a bias is
// the sum of the returned gradient over rows; the caller computes it. Nothing here records autograd
// history.

namespace weft::kernels::cpu {

// act(x + bias)
at::Tensor activation_forward(const at::Tensor& x,
                              const std::optional<at::Tensor>& bias,
                              Activation activation);

// -> (grad_x, h), with h = act(x + bias) recomputed, so that it need not be saved.
std::tuple<at::Tensor, at::Tensor> activation_backward(const at::Tensor& grad_h,
                                                       const at::Tensor& x,
                                                       const std::optional<at::Tensor>& bias,
                                                       Activation activation);

// act(gate + gate_bias) * (up + up_bias): SwiGLU for kSilu, GEGLU for kGelu.
at::Tensor gated_forward(const at::Tensor& gate,
                         const at::Tensor& up,
                         const std::optional<at::Tensor>& gate_bias,
                         const std::optional<at::Tensor>& up_bias,
                         Activation activation);

// -> (grad_gate, grad_up, h), with h recomputed.
std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_backward(
    const at::Tensor& grad_h,
    const at::Tensor& gate,
    const at::Tensor& up,
    const std::optional<at::Tensor>& gate_bias,
    const std::optional<at::Tensor>& up_bias,
    Activation activation);

// silu(gate) * up
inline at::Tensor swiglu_forward(const at::Tensor& gate, const at::Tensor& up) {
  return gated_forward(gate, up, std::nullopt, std::nullopt, Activation::kSilu);
}

// -> (grad_gate, grad_up, h)
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad_h,
                                                                      const at::Tensor& gate,
                                                                      const at::Tensor& up) {
  return gated_backward(grad_h, gate, up, std::nullopt, std::nullopt, Activation::kSilu);
}

}  // namespace weft::kernels::cpu

// The same functions for CUDA tensors, in the library weft_kernels_cuda. They run on the current
// stream of the input's device.
namespace weft::kernels::cuda {

at::Tensor activation_forward(const at::Tensor& x,
                              const std::optional<at::Tensor>& bias,
                              Activation activation);

std::tuple<at::Tensor, at::Tensor> activation_backward(const at::Tensor& grad_h,
                                                       const at::Tensor& x,
                                                       const std::optional<at::Tensor>& bias,
                                                       Activation activation);

at::Tensor gated_forward(const at::Tensor& gate,
                         const at::Tensor& up,
                         const std::optional<at::Tensor>& gate_bias,
                         const std::optional<at::Tensor>& up_bias,
                         Activation activation);

std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_backward(
    const at::Tensor& grad_h,
    const at::Tensor& gate,
    const at::Tensor& up,
    const std::optional<at::Tensor>& gate_bias,
    const std::optional<at::Tensor>& up_bias,
    Activation activation);

inline at::Tensor swiglu_forward(const at::Tensor& gate, const at::Tensor& up) {
  return gated_forward(gate, up, std::nullopt, std::nullopt, Activation::kSilu);
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad_h,
                                                                      const at::Tensor& gate,
                                                                      const at::Tensor& up) {
  return gated_backward(grad_h, gate, up, std::nullopt, std::nullopt, Activation::kSilu);
}

}  // namespace weft::kernels::cuda
