#pragma once

// Gate and up projections as one product. If the weights of gate and up, each [hidden, in], lie one
// after the other in one storage, they are a view of one weight [2 * hidden, in], and the products
// x wᵀ of both are one tensor [..., 2 * hidden], whose halves are gate and up. Then the forward has
// one product instead of two, and so has the gradient of x.

#include "shape.h"

#include <ATen/core/Tensor.h>

namespace weft::ops {

// Returns the weight [2 * hidden, in] of which `gate` is the first half and `up` the second;
// undefined if there is none in their storage, or without `up`. Not for traced tensors.
at::Tensor joined_weight(const at::Tensor& gate, const OptionalTensor& up);

// Returns the contiguous tensor [..., 2 * hidden] of which gate and up, [..., hidden], are the
// halves; undefined if there is none in their storage, or if `up` is undefined.
at::Tensor joined_columns(const at::Tensor& gate, const at::Tensor& up);

// Returns the half of gate_up [..., 2 * hidden] with index 0 (gate) or 1 (up), a view.
at::Tensor half_of(const at::Tensor& gate_up, std::int64_t idx);

}  // namespace weft::ops
