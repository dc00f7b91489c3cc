#pragma once

// Helpers of the autograd formulas of weft's operators.

#include "shape.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <string_view>

namespace weft::ops {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns x as a matrix [tokens, features]; a view where the strides allow it.
at::Tensor as_matrix(const at::Tensor& x);

// Returns grad_outᵀ x over all tokens, [out, in]: the gradient of weight in x weightᵀ.
at::Tensor weight_grad(const at::Tensor& grad_out, const at::Tensor& x);

// Returns the sum of grad_out over all tokens, [out]: the gradient of a bias.
at::Tensor bias_grad(const at::Tensor& grad_out);

// Raises NotImplementedError for a backward with create_graph=True: second derivatives would
// silently lack this operator.
void forbid_double_backward(std::string_view op);

// Prioritizes the backward nodes between `weight` and its leaf (those of DTensor's to_local, a
// cast, a slice), so that the leaf gets its gradient as soon as that of `weight` is computed. The
// engine runs ready nodes by sequence number, highest first; these nodes were made before the
// operator's nodes and would otherwise run after all of the operator's nodes. From `weight` up to
// the first node with several inputs, each gets the leaf's sequence number minus one.
void prioritize_leaf_gradient(const at::Tensor& weight);

inline bool needs_grad(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->requires_grad();
}

}  // namespace weft::ops
