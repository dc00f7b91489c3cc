#pragma once

// The computations that column_row_mlp's device kernels and its autograd formula share. They run
// below autograd and without communication.

#include "shape.h"

#include <ATen/core/Tensor.h>

#include <string_view>
#include <tuple>
#include <utility>

namespace weft::ops {

// Returns (h1, h3) = (x w1ᵀ + b1, x w3ᵀ + b3), [..., f]; h3 is undefined without w3.
std::pair<at::Tensor, at::Tensor> column_half(const at::Tensor& x,
                                              const at::Tensor& w1,
                                              const OptionalTensor& w3,
                                              const OptionalTensor& b1,
                                              const OptionalTensor& b3);

// Returns act(h1) [* h3], [..., f]; `h3` may be undefined.
at::Tensor activate(const at::Tensor& h1, const at::Tensor& h3, std::string_view activation);

}  // namespace weft::ops
