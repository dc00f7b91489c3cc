#pragma once

#include <weft/kernels/activation_kind.h>

#include <ATen/core/Tensor.h>

#include <tuple>

// The elementwise operations of an MLP, each one pass over memory.
//
// Shapes: x, gate, up and grad_h have one shape, except that a gate_up [..., 2 * hidden] has gate
// in the first half of its last dim and up in the second, and grad_h is [..., hidden]. Any strides
// are read; results are contiguous, in the shape and dtype of the input. Dtypes: float32, float64,
// bfloat16, float16, the same for all arguments. bfloat16 and float16 are computed in float32 per
// element and rounded once. Errors: c10::Error, before anything is allocated, if the arguments
// differ in shape, dtype or device, if the last dim of gate_up is not even, if the dtype is not
// supported, or if the tensors are not on the namespace's type of device.
//
// Results for NaN and infinity are those of torch's operators in float64. Nothing here records
// autograd history.

namespace weft::kernels::cpu {

// Returns act(x).
at::Tensor activation_forward(const at::Tensor& x, Activation activation);

// Returns (grad_x, h), where h = act(x) is recomputed, so that the forward need not save it.
std::tuple<at::Tensor, at::Tensor> activation_backward(const at::Tensor& grad_h,
                                                       const at::Tensor& x,
                                                       Activation activation);

// Returns act(gate) * up: SwiGLU for kSilu, GEGLU for kGelu.
at::Tensor gated_forward(const at::Tensor& gate, const at::Tensor& up, Activation activation);

// Returns (grad_gate, grad_up, h), where h = act(gate) * up is recomputed.
std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_backward(const at::Tensor& grad_h,
                                                              const at::Tensor& gate,
                                                              const at::Tensor& up,
                                                              Activation activation);

// gated_forward() of the halves of gate_up, [..., hidden].
at::Tensor gate_up_forward(const at::Tensor& gate_up, Activation activation);

// -> (grad_gate_up [..., 2 * hidden], h [..., hidden]): gated_backward() of the halves.
std::tuple<at::Tensor, at::Tensor> gate_up_backward(const at::Tensor& grad_h,
                                                    const at::Tensor& gate_up,
                                                    Activation activation);

}  // namespace weft::kernels::cpu

// The same functions for CUDA tensors, in the library weft_kernels_cuda. They run on the current
// stream of the input's device.
namespace weft::kernels::cuda {

at::Tensor activation_forward(const at::Tensor& x, Activation activation);

std::tuple<at::Tensor, at::Tensor> activation_backward(const at::Tensor& grad_h,
                                                       const at::Tensor& x,
                                                       Activation activation);

at::Tensor gated_forward(const at::Tensor& gate, const at::Tensor& up, Activation activation);

std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_backward(const at::Tensor& grad_h,
                                                              const at::Tensor& gate,
                                                              const at::Tensor& up,
                                                              Activation activation);

at::Tensor gate_up_forward(const at::Tensor& gate_up, Activation activation);

std::tuple<at::Tensor, at::Tensor> gate_up_backward(const at::Tensor& grad_h,
                                                    const at::Tensor& gate_up,
                                                    Activation activation);

}  // namespace weft::kernels::cuda
