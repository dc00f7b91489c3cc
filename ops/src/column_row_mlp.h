#pragma once

// The computations that column_row_mlp's device kernels and its autograd formula share. They run
// below autograd and without communication.

#include "shape.h"

#include <ATen/core/Tensor.h>

#include <string_view>

namespace weft::ops {

// The hidden values of a call: h1 = x w1ᵀ + b1 and, unless undefined, h3 = x w3ᵀ + b3, [..., f].
struct Hidden {
  at::Tensor h1, h3;
  // If defined, h1 and h3 are its halves: see gate_up.h.
  at::Tensor gate_up;

  // Returns the value for `gate_up` [..., 2 * f].
  static Hidden of_gate_up(const at::Tensor& gate_up);
};

// Computes the hidden values. If `may_join`, gate and up are one product where w1 and w3 are halves
// of one weight and have no biases.
Hidden column_half(const at::Tensor& x,
                   const at::Tensor& w1,
                   const OptionalTensor& w3,
                   const OptionalTensor& b1,
                   const OptionalTensor& b3,
                   bool may_join);

// Returns act(h1) [* h3], [..., f].
at::Tensor activate(const Hidden& hidden, std::string_view activation);

}  // namespace weft::ops
