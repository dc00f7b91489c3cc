#include "row_products.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

namespace weft::ops {

namespace {

// Returns the dtype in which sums over chunks accumulate.
at::ScalarType sum_dtype(at::ScalarType dtype) {
  return at::isReducedFloatingType(dtype) ? at::kFloat : dtype;
}

bool is_one_matrix(const at::Tensor& rows) { return rows.dim() == 2 || rows.is_contiguous(); }

// Returns the rows of several ranks as [num_ranks, tokens, features], without a copy; nullopt if
// the strides require one.
std::optional<at::Tensor> rank_matrices(const at::Tensor& rows, std::int64_t num_ranks) {
  if (is_one_matrix(rows)) {
    return row_matrix(rows).unflatten(0, {num_ranks, -1});
  }
  TORCH_INTERNAL_ASSERT(rows.size(0) == num_ranks, "not a view of ChunkRows::of()");
  return rows.select(0, 0).is_contiguous() ? std::optional(rows.flatten(1, -2)) : std::nullopt;
}

}  // namespace

std::vector<std::int64_t> row_sizes(const at::Tensor& x, std::int64_t dim, std::int64_t features) {
  auto sizes = x.sizes().vec();
  sizes.back() = features;
  sizes.erase(sizes.begin() + dim);
  return sizes;
}

at::Tensor row_matrix(const at::Tensor& rows) { return rows.flatten(0, -2); }

void product_into(const at::Tensor& out,
                  const at::Tensor& rows,
                  const at::Tensor& matrix,
                  std::int64_t num_ranks) {
  if (num_ranks > 1 && !(out.is_contiguous() && is_one_matrix(rows))) {
    auto to = rank_matrices(out, num_ranks);
    const auto from = rank_matrices(rows, num_ranks);
    if (to.has_value() && from.has_value()) {
      at::bmm_out(*to, *from, matrix.expand({num_ranks, -1, -1}));
      return;
    }
  }
  if (out.is_contiguous()) {
    auto to = row_matrix(out);
    at::mm_out(to, row_matrix(rows), matrix);
  } else {
    out.copy_(at::mm(row_matrix(rows), matrix).view(out.sizes()));
  }
}

void linear_into(const at::Tensor& out,
                 const at::Tensor& rows,
                 const at::Tensor& weight,
                 const OptionalTensor& bias,
                 std::int64_t num_ranks) {
  if (!bias.has_value()) {
    product_into(out, rows, weight.t(), num_ranks);
  } else if (out.is_contiguous()) {
    auto to = row_matrix(out);
    at::addmm_out(to, *bias, row_matrix(rows), weight.t());
  } else {
    out.copy_(at::linear(row_matrix(rows), weight, bias).view(out.sizes()));
  }
}

void add_product(at::Tensor& sum, const at::Tensor& left, const at::Tensor& right) {
  if (sum.scalar_type() == left.scalar_type()) {
    sum.addmm_(left, right);
  } else if (left.is_cuda()) {
    // The product accumulates into the sum, without a tensor of its own; only CUDA has this kernel.
    at::addmm_out(sum, sum, left, right, sum.scalar_type());
  } else {
    sum.add_(at::mm(left, right));
  }
}

void WeightGradSum::add(const at::Tensor& grads, const at::Tensor& x) {
  const auto dtype = sum_dtype(weight_.scalar_type());
  if (sum_.defined()) {
    add_product(sum_, grads.t(), x);
  } else if (grads.is_cuda() && dtype != grads.scalar_type()) {
    sum_ = at::mm(grads.t(), x, dtype);
  } else {
    sum_ = at::mm(grads.t(), x).to(dtype);
  }
}

at::Tensor WeightGradSum::get() const {
  return sum_.defined() ? sum_.to(weight_.scalar_type())
                        : at::zeros(weight_.sizes(), weight_.options());
}

void BiasGradSum::add(const at::Tensor& grads) {
  const auto sum = grads.sum(0, /*keepdim=*/false, sum_dtype(weight_.scalar_type()));
  sum_ = sum_.defined() ? sum_.add_(sum) : sum;
}

at::Tensor BiasGradSum::get() const {
  return sum_.defined() ? sum_.to(weight_.scalar_type())
                        : at::zeros({weight_.size(0)}, weight_.options());
}

}  // namespace weft::ops
