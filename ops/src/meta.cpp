// Meta kernels: each calls the shape function and returns an empty tensor. Fake tensors use them
// too, and thus compile and export.

#include "group_collectives.h"
#include "shape.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace weft::ops {

namespace {

at::Tensor empty(c10::SymIntArrayRef sizes, const at::Tensor& like) {
  return at::empty_symint(sizes, like.options());
}

at::Tensor empty_contiguous_like(const at::Tensor& x) { return empty(x.sym_sizes(), x); }

std::optional<Sequence> sequence_of(const at::Tensor& x,
                                    std::string_view group_name,
                                    const std::optional<std::int64_t>& sequence_dim,
                                    const std::optional<c10::SymInt>& sequence_size) {
  const auto group_rank = rank_in("weft::column_row_mlp", group_name);
  return mlp_sequence(x, sequence_dim, sequence_size, group_rank);
}

at::Tensor column_row_mlp(const at::Tensor& x,
                          const at::Tensor& w1,
                          const at::Tensor& w2,
                          const OptionalTensor& w3,
                          const OptionalTensor& b1,
                          const OptionalTensor& b2,
                          const OptionalTensor& b3,
                          std::string_view activation,
                          std::string_view group_name,
                          bool /*recompute*/,
                          std::optional<std::int64_t> sequence_dim,
                          std::optional<c10::SymInt> sequence_size) {
  sequence_of(x, group_name, sequence_dim, sequence_size);
  return empty(column_row_mlp_shape(x, w1, w2, w3, b1, b2, b3, activation), x);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> column_row_mlp_saving(
    const at::Tensor& x,
    const at::Tensor& w1,
    const at::Tensor& w2,
    const OptionalTensor& w3,
    const OptionalTensor& b1,
    const OptionalTensor& b2,
    const OptionalTensor& b3,
    std::string_view activation,
    std::string_view group_name,
    std::optional<std::int64_t> sequence_dim,
    std::optional<c10::SymInt> sequence_size) {
  auto y = empty(column_row_mlp_shape(x, w1, w2, w3, b1, b2, b3, activation), x);
  c10::SymDimVector hidden(x.sym_sizes().begin(), x.sym_sizes().end());
  hidden.back() = w1.sym_size(0);
  if (const auto sequence = sequence_of(x, group_name, sequence_dim, sequence_size)) {
    hidden[static_cast<std::size_t>(sequence->dim)] = sequence->size;
  }
  return {y, empty(hidden, x), w3.has_value() ? empty(hidden, x) : at::empty({0}, x.options())};
}

at::Tensor column_linear(const at::Tensor& x,
                         const at::Tensor& weight,
                         const OptionalTensor& bias,
                         std::string_view /*group_name*/) {
  return empty(linear_shape("weft::column_linear", x, weight, bias), x);
}

at::Tensor row_linear(const at::Tensor& x,
                      const at::Tensor& weight,
                      const OptionalTensor& bias,
                      std::string_view /*group_name*/) {
  return empty(linear_shape("weft::row_linear", x, weight, bias), x);
}

at::Tensor vocab_parallel_embedding(const at::Tensor& ids,
                                    const at::Tensor& weight,
                                    std::int64_t vocab_start,
                                    std::string_view /*group_name*/,
                                    std::optional<std::int64_t> /*vocab_size*/) {
  return empty(vocab_embedding_shape(ids, weight, vocab_start), weight);
}

at::Tensor vocab_embedding_backward(const at::Tensor& grad,
                                    const at::Tensor& /*ids*/,
                                    c10::SymInt num_rows,
                                    std::int64_t /*vocab_start*/) {
  return empty({std::move(num_rows), grad.sym_size(-1)}, grad);
}

at::Tensor copy_to_group(const at::Tensor& x, std::string_view /*group_name*/) {
  return at::empty_like(x);
}

at::Tensor reduce_from_group(const at::Tensor& x, std::string_view /*group_name*/) {
  return empty_contiguous_like(x);
}

at::Tensor activation(const at::Tensor& x, std::string_view name) {
  checked_activation("weft::_activation", name);
  return empty_contiguous_like(x);
}

std::tuple<at::Tensor, at::Tensor> activation_backward(const at::Tensor& /*grad*/,
                                                       const at::Tensor& x,
                                                       std::string_view name) {
  checked_activation("weft::_activation_backward", name);
  return {empty_contiguous_like(x), empty_contiguous_like(x)};
}

at::Tensor gated_activation(const at::Tensor& gate,
                            const at::Tensor& /*up*/,
                            std::string_view name) {
  checked_activation("weft::_gated_activation", name);
  return empty_contiguous_like(gate);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_activation_backward(const at::Tensor& /*grad*/,
                                                                         const at::Tensor& gate,
                                                                         const at::Tensor& /*up*/,
                                                                         std::string_view name) {
  checked_activation("weft::_gated_activation_backward", name);
  return {empty_contiguous_like(gate), empty_contiguous_like(gate), empty_contiguous_like(gate)};
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("column_row_mlp", TORCH_FN(column_row_mlp));
  m.impl("_column_row_mlp_saving", TORCH_FN(column_row_mlp_saving));
  m.impl("column_linear", TORCH_FN(column_linear));
  m.impl("row_linear", TORCH_FN(row_linear));
  m.impl("vocab_parallel_embedding", TORCH_FN(vocab_parallel_embedding));
  m.impl("_vocab_embedding_backward", TORCH_FN(vocab_embedding_backward));
  m.impl("copy_to_group", TORCH_FN(copy_to_group));
  m.impl("reduce_from_group", TORCH_FN(reduce_from_group));
  m.impl("_activation", TORCH_FN(activation));
  m.impl("_activation_backward", TORCH_FN(activation_backward));
  m.impl("_gated_activation", TORCH_FN(gated_activation));
  m.impl("_gated_activation_backward", TORCH_FN(gated_activation_backward));
}

}  // namespace weft::ops
