#include "dispatch.h"

#include "dispatch_handle.h"

#include <utility>

namespace weft::ops::dispatch {

at::Tensor column_row_mlp(const at::Tensor& x,
                          const at::Tensor& w1,
                          const at::Tensor& w2,
                          const OptionalTensor& w3,
                          const OptionalTensor& b1,
                          const OptionalTensor& b2,
                          const OptionalTensor& b3,
                          std::string_view activation,
                          std::string_view group_name,
                          bool recompute,
                          std::optional<std::int64_t> sequence_dim,
                          std::optional<c10::SymInt> sequence_size) {
  static const auto op = handle("weft::column_row_mlp", &column_row_mlp);
  return op.call(x,
                 w1,
                 w2,
                 w3,
                 b1,
                 b2,
                 b3,
                 activation,
                 group_name,
                 recompute,
                 sequence_dim,
                 std::move(sequence_size));
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
  static const auto op = handle("weft::_column_row_mlp_saving", &column_row_mlp_saving);
  return op.call(
      x, w1, w2, w3, b1, b2, b3, activation, group_name, sequence_dim, std::move(sequence_size));
}

at::Tensor column_linear(const at::Tensor& x,
                         const at::Tensor& weight,
                         const OptionalTensor& bias,
                         std::string_view group_name) {
  static const auto op = handle("weft::column_linear", &column_linear);
  return op.call(x, weight, bias, group_name);
}

at::Tensor row_linear(const at::Tensor& x,
                      const at::Tensor& weight,
                      const OptionalTensor& bias,
                      std::string_view group_name) {
  static const auto op = handle("weft::row_linear", &row_linear);
  return op.call(x, weight, bias, group_name);
}

at::Tensor all_gather_linear(const at::Tensor& x,
                             const at::Tensor& weight,
                             const OptionalTensor& bias,
                             std::int64_t gather_dim,
                             std::string_view group_name,
                             std::optional<c10::SymInt> dim_size) {
  static const auto op = handle("weft::all_gather_linear", &all_gather_linear);
  return op.call(x, weight, bias, gather_dim, group_name, std::move(dim_size));
}

at::Tensor linear_reduce_scatter(const at::Tensor& x,
                                 const at::Tensor& weight,
                                 const OptionalTensor& bias,
                                 std::int64_t scatter_dim,
                                 std::string_view group_name) {
  static const auto op = handle("weft::linear_reduce_scatter", &linear_reduce_scatter);
  return op.call(x, weight, bias, scatter_dim, group_name);
}

std::tuple<at::Tensor, at::Tensor> all_gather_linear_backward(const at::Tensor& grad_y,
                                                              const at::Tensor& x,
                                                              const at::Tensor& weight,
                                                              std::int64_t dim,
                                                              std::string_view group_name,
                                                              bool wants_x,
                                                              bool wants_weight) {
  static const auto op = handle("weft::_all_gather_linear_backward", &all_gather_linear_backward);
  return op.call(grad_y, x, weight, dim, group_name, wants_x, wants_weight);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_reduce_scatter_backward(
    const at::Tensor& grad_y,
    const at::Tensor& x,
    const at::Tensor& weight,
    std::int64_t dim,
    std::string_view group_name,
    bool wants_x,
    bool wants_weight,
    bool wants_bias) {
  static const auto op =
      handle("weft::_linear_reduce_scatter_backward", &linear_reduce_scatter_backward);
  return op.call(grad_y, x, weight, dim, group_name, wants_x, wants_weight, wants_bias);
}

at::Tensor sharded_linear(const at::Tensor& x,
                          const at::Tensor& weight,
                          const OptionalTensor& bias,
                          std::string_view group_name,
                          std::optional<c10::SymInt> out_features) {
  static const auto op = handle("weft::sharded_linear", &sharded_linear);
  return op.call(x, weight, bias, group_name, std::move(out_features));
}

at::Tensor sharded_linear_input_grad(const at::Tensor& grad_y,
                                     const at::Tensor& weight,
                                     std::string_view group_name) {
  static const auto op = handle("weft::_sharded_linear_input_grad", &sharded_linear_input_grad);
  return op.call(grad_y, weight, group_name);
}

at::Tensor sharded_linear_shard_grad(const at::Tensor& grad_y,
                                     const at::Tensor& x,
                                     std::string_view group_name) {
  static const auto op = handle("weft::_sharded_linear_shard_grad", &sharded_linear_shard_grad);
  return op.call(grad_y, x, group_name);
}

at::Tensor vocab_parallel_embedding(const at::Tensor& ids,
                                    const at::Tensor& weight,
                                    std::int64_t vocab_start,
                                    std::string_view group_name,
                                    std::optional<std::int64_t> vocab_size) {
  static const auto op = handle("weft::vocab_parallel_embedding", &vocab_parallel_embedding);
  return op.call(ids, weight, vocab_start, group_name, vocab_size);
}

at::Tensor vocab_embedding_backward(const at::Tensor& grad,
                                    const at::Tensor& ids,
                                    c10::SymInt num_rows,
                                    std::int64_t vocab_start) {
  static const auto op = handle("weft::_vocab_embedding_backward", &vocab_embedding_backward);
  return op.call(grad, ids, std::move(num_rows), vocab_start);
}

at::Tensor rms_norm(const at::Tensor& x,
                    const OptionalTensor& weight,
                    std::string_view group_name,
                    double eps) {
  static const auto op = handle("weft::rms_norm", &rms_norm);
  return op.call(x, weight, group_name, eps);
}

at::Tensor layer_norm(const at::Tensor& x,
                      const OptionalTensor& weight,
                      const OptionalTensor& bias,
                      std::string_view group_name,
                      double eps) {
  static const auto op = handle("weft::layer_norm", &layer_norm);
  return op.call(x, weight, bias, group_name, eps);
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                const at::Tensor& residual,
                                                const OptionalTensor& weight,
                                                std::string_view group_name,
                                                double eps) {
  static const auto op = handle("weft::add_rms_norm", &add_rms_norm);
  return op.call(x, residual, weight, group_name, eps);
}

std::tuple<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x,
                                                  const at::Tensor& residual,
                                                  const OptionalTensor& weight,
                                                  const OptionalTensor& bias,
                                                  std::string_view group_name,
                                                  double eps) {
  static const auto op = handle("weft::add_layer_norm", &add_layer_norm);
  return op.call(x, residual, weight, bias, group_name, eps);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm(const at::Tensor& x,
                                                                const OptionalTensor& residual,
                                                                const OptionalTensor& weight,
                                                                const OptionalTensor& bias,
                                                                bool centered,
                                                                double eps) {
  static const auto op = handle("weft::_norm", &norm);
  return op.call(x, residual, weight, bias, centered, eps);
}

std::tuple<at::Tensor, at::Tensor> norm_backward(const at::Tensor& grad_y,
                                                 const OptionalTensor& grad_sum,
                                                 const at::Tensor& v,
                                                 const OptionalTensor& weight,
                                                 const at::Tensor& mean,
                                                 const at::Tensor& rstd,
                                                 bool centered,
                                                 bool wants_input,
                                                 std::int64_t num_params) {
  static const auto op = handle("weft::_norm_backward", &norm_backward);
  return op.call(grad_y, grad_sum, v, weight, mean, rstd, centered, wants_input, num_params);
}

at::Tensor pipeline_send(at::TensorList tensors,
                         std::int64_t peer,
                         std::int64_t channel,
                         std::string_view group_name) {
  static const auto op = handle("weft::pipeline_send", &pipeline_send);
  return op.call(tensors, peer, channel, group_name);
}

at::Tensor pipeline_recv(at::TensorList like,
                         std::int64_t peer,
                         std::int64_t channel,
                         std::string_view group_name) {
  static const auto op = handle("weft::pipeline_recv", &pipeline_recv);
  return op.call(like, peer, channel, group_name);
}

std::vector<at::Tensor> pipeline_wait(const at::Tensor& token) {
  static const auto op = handle("weft::pipeline_wait", &pipeline_wait);
  return op.call(token);
}

void pipeline_flush(std::string_view group_name) {
  static const auto op = handle("weft::pipeline_flush", &pipeline_flush);
  op.call(group_name);
}

at::Tensor join(const at::Tensor& x, at::TensorList tokens) {
  static const auto op = handle("weft::join", &join);
  return op.call(x, tokens);
}

at::Tensor dropout(const at::Tensor& x,
                   const at::Tensor& seed,
                   double p,
                   std::string_view group_name,
                   std::optional<std::int64_t> dim,
                   std::optional<c10::SymInt> dim_size) {
  static const auto op = handle("weft::dropout", &dropout);
  return op.call(x, seed, p, group_name, dim, std::move(dim_size));
}

at::Tensor dropout_of_part(const at::Tensor& x,
                           std::int64_t seed,
                           double p,
                           std::int64_t inner,
                           std::int64_t size,
                           std::int64_t begin,
                           std::int64_t whole_size) {
  static const auto op = handle("weft::_dropout_of_part", &dropout_of_part);
  return op.call(x, seed, p, inner, size, begin, whole_size);
}

at::Tensor copy_to_group(const at::Tensor& x, std::string_view group_name) {
  static const auto op = handle("weft::copy_to_group", &copy_to_group);
  return op.call(x, group_name);
}

at::Tensor reduce_from_group(const at::Tensor& x, std::string_view group_name) {
  static const auto op = handle("weft::reduce_from_group", &reduce_from_group);
  return op.call(x, group_name);
}

at::Tensor scatter_to_group(const at::Tensor& x, std::int64_t dim, std::string_view group_name) {
  static const auto op = handle("weft::scatter_to_group", &scatter_to_group);
  return op.call(x, dim, group_name);
}

at::Tensor gather_from_group(const at::Tensor& x,
                             std::int64_t dim,
                             std::string_view group_name,
                             std::optional<c10::SymInt> dim_size) {
  static const auto op = handle("weft::gather_from_group", &gather_from_group);
  return op.call(x, dim, group_name, std::move(dim_size));
}

at::Tensor gather_from_sequence(const at::Tensor& x,
                                std::int64_t dim,
                                std::string_view group_name,
                                std::optional<c10::SymInt> dim_size) {
  static const auto op = handle("weft::gather_from_sequence", &gather_from_sequence);
  return op.call(x, dim, group_name, std::move(dim_size));
}

at::Tensor reduce_scatter_to_sequence(const at::Tensor& x,
                                      std::int64_t dim,
                                      std::string_view group_name) {
  static const auto op = handle("weft::reduce_scatter_to_sequence", &reduce_scatter_to_sequence);
  return op.call(x, dim, group_name);
}

at::Tensor all_to_all(const at::Tensor& x,
                      std::int64_t split_dim,
                      std::int64_t cat_dim,
                      std::string_view group_name,
                      std::optional<c10::SymInt> cat_size) {
  static const auto op = handle("weft::all_to_all", &all_to_all);
  return op.call(x, split_dim, cat_dim, group_name, std::move(cat_size));
}

at::Tensor activation(const at::Tensor& x, std::string_view activation) {
  static const auto op = handle("weft::_activation", &dispatch::activation);
  return op.call(x, activation);
}

std::tuple<at::Tensor, at::Tensor> activation_backward(const at::Tensor& grad,
                                                       const at::Tensor& x,
                                                       std::string_view activation) {
  static const auto op = handle("weft::_activation_backward", &activation_backward);
  return op.call(grad, x, activation);
}

at::Tensor gated_activation(const at::Tensor& gate,
                            const at::Tensor& up,
                            std::string_view activation) {
  static const auto op = handle("weft::_gated_activation", &gated_activation);
  return op.call(gate, up, activation);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_activation_backward(
    const at::Tensor& grad,
    const at::Tensor& gate,
    const at::Tensor& up,
    std::string_view activation) {
  static const auto op = handle("weft::_gated_activation_backward", &gated_activation_backward);
  return op.call(grad, gate, up, activation);
}

}  // namespace weft::ops::dispatch
