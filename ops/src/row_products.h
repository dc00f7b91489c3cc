#pragma once

// Products of some rows of a sequence at a time, for operators that go in pieces. Rows are the
// first dim; what is summed over them is summed in float32 at least.

#include "shape.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace weft::ops {

// The sizes of a row of x with `features` for a token: those of all dims but `dim`.
std::vector<std::int64_t> row_sizes(const at::Tensor& x, std::int64_t dim, std::int64_t features);

// [rows, ..., features] as [tokens, features], copied where the strides ask for it.
at::Tensor row_matrix(const at::Tensor& rows);

// out = rows matrix, and out = rows weightᵀ + bias; `out` [rows, ..., features] of any strides.
void product_into(const at::Tensor& out, const at::Tensor& rows, const at::Tensor& matrix);
void linear_into(const at::Tensor& out,
                 const at::Tensor& rows,
                 const at::Tensor& weight,
                 const OptionalTensor& bias = std::nullopt);

// The gradient of a weight [out, in], rows after rows; zero without any.
class WeightGradSum {
 public:
  explicit WeightGradSum(const at::Tensor& weight) : weight_(weight) {}
  // grads [tokens, out], x [tokens, in].
  void add(const at::Tensor& grads, const at::Tensor& x);
  at::Tensor get() const;

 private:
  const at::Tensor& weight_;
  at::Tensor sum_;
};

// The gradient of a bias [out] of a weight [out, in].
class BiasGradSum {
 public:
  explicit BiasGradSum(const at::Tensor& weight) : weight_(weight) {}
  void add(const at::Tensor& grads);
  at::Tensor get() const;

 private:
  const at::Tensor& weight_;
  at::Tensor sum_;
};

}  // namespace weft::ops
