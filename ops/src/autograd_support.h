#pragma once

// What the autograd formulas of weft's operators share.

#include "shape.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <string_view>

namespace weft::ops {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The input as a matrix [tokens, features]; a view where the strides allow it.
at::Tensor as_matrix(const at::Tensor& x);

// grad_outᵀ x over all tokens: the gradient of weight in x weightᵀ, [out, in].
at::Tensor weight_grad(const at::Tensor& grad_out, const at::Tensor& x);

// The sum of grad_out over all tokens: the gradient of a bias, [out].
at::Tensor bias_grad(const at::Tensor& grad_out);

// Refuses a backward with create_graph=True: second derivatives would silently lack this operator.
void refuse_double_backward(std::string_view op);

// Lets the gradient of `weight` run to its leaf as soon as it is there. The engine runs ready nodes
// by sequence number, highest first; a weight that enters through views made before the operator
// (DTensor's to_local, a cast, a slice) would otherwise wait for all of the operator's own nodes.
// Views that lead straight to one leaf get the priority of the leaf itself less one.
void hurry_to_leaf(const at::Tensor& weight);

inline bool needs_grad(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->requires_grad();
}

}  // namespace weft::ops
