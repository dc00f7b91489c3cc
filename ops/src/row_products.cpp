#include "row_products.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

namespace weft::ops {

namespace {

// The accumulation dtype.
at::ScalarType sum_dtype(at::ScalarType dtype) {
  return at::isReducedFloatingType(dtype) ? at::kFloat : dtype;
}

}  // namespace

std::vector<std::int64_t> row_sizes(const at::Tensor& x, std::int64_t dim, std::int64_t features) {
  auto sizes = x.sizes().vec();
  sizes.back() = features;
  sizes.erase(sizes.begin() + dim);
  return sizes;
}

at::Tensor row_matrix(const at::Tensor& rows) { return rows.flatten(0, -2); }

void product_into(const at::Tensor& out, const at::Tensor& rows, const at::Tensor& matrix) {
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
                 const OptionalTensor& bias) {
  if (!bias.has_value()) {
    product_into(out, rows, weight.t());
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
