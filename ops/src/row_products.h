#pragma once

// Matrix products of the rows of one chunk, for operators that use ChunkedSequence. A row is one
// index of the chunked dim, which comes first. Sums over chunks accumulate in float32, or float64
// for float64.

#include "shape.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace weft::ops {

// Returns the shape of one row: that of x without `dim`, with `features` in the last dim.
std::vector<std::int64_t> row_sizes(const at::Tensor& x, std::int64_t dim, std::int64_t features);

// Returns [rows, ..., features] as [tokens, features]; a copy where the strides require one.
at::Tensor row_matrix(const at::Tensor& rows);

// Computes out = rows @ matrix, or out = rows @ weightᵀ + bias, into `out` [rows, ..., features],
// of any strides. If num_ranks > 1, `rows` and `out` hold the rows of several ranks, as in
// ChunkRows: contiguous, as a row_matrix(), or as the view [num_ranks, rows, ..., features] of a
// full tensor. A batched product then reads and writes the views directly, unless there is a bias
// or the rows of a rank are not contiguous.
void product_into(const at::Tensor& out,
                  const at::Tensor& rows,
                  const at::Tensor& matrix,
                  std::int64_t num_ranks);
void linear_into(const at::Tensor& out,
                 const at::Tensor& rows,
                 const at::Tensor& weight,
                 const OptionalTensor& bias,
                 std::int64_t num_ranks);

// Adds left @ right to `sum`, whose dtype is that of left and right, or float32 if they are
// bfloat16 or float16.
void add_product(at::Tensor& sum, const at::Tensor& left, const at::Tensor& right);

// Accumulates the gradient of a weight [out, in] over chunks; it is zero without chunks.
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

// Accumulates the gradient of the bias [out] that belongs to a weight [out, in].
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
