#include "reduced_products.h"

#include "autograd_support.h"

#include <ATen/ops/mm.h>

#include <vector>

namespace weft::ops {

namespace {

// The sizes of x with another last dim.
std::vector<int64_t> with_last(const at::Tensor& x, int64_t size) {
  auto sizes = x.sizes().vec();
  sizes.back() = size;
  return sizes;
}

at::Tensor matrix_of(const at::Tensor& out) { return out.view({-1, out.size(-1)}); }

}  // namespace

at::Tensor reduced_linear(std::string_view op,
                          const at::Tensor& x,
                          const at::Tensor& weight,
                          const ProcessGroupPtr& group) {
  return all_reduce_from_writer(
      op, with_last(x, weight.size(0)), x.options(), group, [&](at::Tensor& out) {
        if (out.numel() > 0) {
          auto matrix = matrix_of(out);
          at::mm_out(matrix, as_matrix(x), weight.t());
        }
      });
}

std::pair<at::Tensor, PendingCollective> start_reduced_input_product(
    std::string_view op,
    const ProcessGroupPtr& group,
    bool overlaps,
    const at::Tensor& grad,
    const at::Tensor& weight,
    const at::Tensor& second_grad,
    const at::Tensor& second_weight) {
  return start_all_reduce_from_writer(
      op, with_last(grad, weight.size(1)), grad.options(), group, overlaps, [&](at::Tensor& out) {
        if (out.numel() == 0) {
          return;
        }
        auto matrix = matrix_of(out);
        at::mm_out(matrix, as_matrix(grad), weight);
        if (second_weight.defined()) {
          matrix.addmm_(as_matrix(second_grad), second_weight);
        }
      });
}

}  // namespace weft::ops
