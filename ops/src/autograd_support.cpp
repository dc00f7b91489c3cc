#include "autograd_support.h"

#include <ATen/ops/mm.h>

#include <cstdint>
#include <limits>

namespace weft::ops {

at::Tensor as_matrix(const at::Tensor& x) {
  if (x.dim() == 2) {
    return x;
  }
  return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2);
}

at::Tensor weight_grad(const at::Tensor& grad_out, const at::Tensor& x) {
  return at::mm(as_matrix(grad_out).t(), as_matrix(x));
}

at::Tensor bias_grad(const at::Tensor& grad_out) { return as_matrix(grad_out).sum(0); }

void forbid_double_backward(std::string_view op) {
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(),
                              op,
                              ": got a backward with create_graph=True, but this operator has no "
                              "second derivative; call backward without create_graph.");
}

void prioritize_leaf_gradient(const at::Tensor& weight) {
  constexpr auto kLeaf = std::numeric_limits<std::uint64_t>::max();
  auto* node = weight.grad_fn().get();
  while (node != nullptr && node->sequence_nr() < kLeaf - 1 && node->num_outputs() == 1) {
    node->set_sequence_nr(kLeaf - 1);
    node = node->next_edge(0).function.get();
  }
}

}  // namespace weft::ops
