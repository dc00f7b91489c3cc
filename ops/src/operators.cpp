#include "dispatch.h"

#include <weft/ops/operators.h>

namespace weft::ops {

at::Tensor column_row_mlp(const at::Tensor& x,
                          const ColumnRowMlpWeights& weights,
                          std::string_view activation,
                          std::string_view group_name,
                          bool recompute,
                          std::optional<std::int64_t> sequence_dim,
                          std::optional<std::int64_t> sequence_size) {
  return dispatch::column_row_mlp(x,
                                  weights.w1,
                                  weights.w2,
                                  weights.w3,
                                  weights.b1,
                                  weights.b2,
                                  weights.b3,
                                  activation,
                                  group_name,
                                  recompute,
                                  sequence_dim,
                                  sequence_size);
}

at::Tensor column_linear(const at::Tensor& x,
                         const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias,
                         std::string_view group_name) {
  return dispatch::column_linear(x, weight, bias, group_name);
}

at::Tensor row_linear(const at::Tensor& x,
                      const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias,
                      std::string_view group_name) {
  return dispatch::row_linear(x, weight, bias, group_name);
}

at::Tensor all_gather_linear(const at::Tensor& x,
                             const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias,
                             std::int64_t gather_dim,
                             std::string_view group_name,
                             std::optional<std::int64_t> dim_size) {
  return dispatch::all_gather_linear(x, weight, bias, gather_dim, group_name, dim_size);
}

at::Tensor linear_reduce_scatter(const at::Tensor& x,
                                 const at::Tensor& weight,
                                 const std::optional<at::Tensor>& bias,
                                 std::int64_t scatter_dim,
                                 std::string_view group_name) {
  return dispatch::linear_reduce_scatter(x, weight, bias, scatter_dim, group_name);
}

at::Tensor sharded_linear(const at::Tensor& x,
                          const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias,
                          std::string_view group_name,
                          std::optional<std::int64_t> out_features) {
  return dispatch::sharded_linear(x, weight, bias, group_name, out_features);
}

at::Tensor vocab_parallel_embedding(const at::Tensor& ids,
                                    const at::Tensor& weight,
                                    std::int64_t vocab_start,
                                    std::string_view group_name,
                                    std::optional<std::int64_t> vocab_size) {
  return dispatch::vocab_parallel_embedding(ids, weight, vocab_start, group_name, vocab_size);
}

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits,
                                        const at::Tensor& target,
                                        std::int64_t vocab_start,
                                        std::string_view group_name,
                                        const CrossEntropyOptions& options) {
  return dispatch::vocab_parallel_cross_entropy(logits,
                                                target,
                                                vocab_start,
                                                group_name,
                                                options.vocab_size,
                                                options.ignore_index,
                                                options.label_smoothing,
                                                options.reduction);
}

at::Tensor vocab_parallel_linear_cross_entropy(const at::Tensor& x,
                                               const at::Tensor& weight,
                                               const at::Tensor& target,
                                               std::int64_t vocab_start,
                                               std::string_view group_name,
                                               const CrossEntropyOptions& options) {
  return dispatch::vocab_parallel_linear_cross_entropy(x,
                                                       weight,
                                                       target,
                                                       vocab_start,
                                                       group_name,
                                                       options.vocab_size,
                                                       options.ignore_index,
                                                       options.label_smoothing,
                                                       options.reduction);
}

at::Tensor rms_norm(const at::Tensor& x,
                    const std::optional<at::Tensor>& weight,
                    std::string_view group_name,
                    double eps) {
  return dispatch::rms_norm(x, weight, group_name, eps);
}

at::Tensor layer_norm(const at::Tensor& x,
                      const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias,
                      std::string_view group_name,
                      double eps) {
  return dispatch::layer_norm(x, weight, bias, group_name, eps);
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                const at::Tensor& residual,
                                                const std::optional<at::Tensor>& weight,
                                                std::string_view group_name,
                                                double eps) {
  return dispatch::add_rms_norm(x, residual, weight, group_name, eps);
}

std::tuple<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x,
                                                  const at::Tensor& residual,
                                                  const std::optional<at::Tensor>& weight,
                                                  const std::optional<at::Tensor>& bias,
                                                  std::string_view group_name,
                                                  double eps) {
  return dispatch::add_layer_norm(x, residual, weight, bias, group_name, eps);
}

at::Tensor dropout(const at::Tensor& x,
                   const at::Tensor& seed,
                   double p,
                   std::string_view group_name,
                   std::optional<std::int64_t> dim,
                   std::optional<std::int64_t> dim_size) {
  return dispatch::dropout(x, seed, p, group_name, dim, dim_size);
}

at::Tensor pipeline_send(at::TensorList tensors,
                         std::int64_t peer,
                         std::int64_t channel,
                         std::string_view group_name) {
  return dispatch::pipeline_send(tensors, peer, channel, group_name);
}

at::Tensor pipeline_recv(at::TensorList like,
                         std::int64_t peer,
                         std::int64_t channel,
                         std::string_view group_name) {
  return dispatch::pipeline_recv(like, peer, channel, group_name);
}

std::vector<at::Tensor> pipeline_wait(const at::Tensor& token) {
  return dispatch::pipeline_wait(token);
}

void pipeline_flush(std::string_view group_name) { dispatch::pipeline_flush(group_name); }

at::Tensor join(const at::Tensor& x, at::TensorList tokens) { return dispatch::join(x, tokens); }

at::Tensor copy_to_group(const at::Tensor& x, std::string_view group_name) {
  return dispatch::copy_to_group(x, group_name);
}

at::Tensor reduce_from_group(const at::Tensor& x, std::string_view group_name) {
  return dispatch::reduce_from_group(x, group_name);
}

at::Tensor scatter_to_group(const at::Tensor& x, std::int64_t dim, std::string_view group_name) {
  return dispatch::scatter_to_group(x, dim, group_name);
}

at::Tensor gather_from_group(const at::Tensor& x,
                             std::int64_t dim,
                             std::string_view group_name,
                             std::optional<std::int64_t> dim_size) {
  return dispatch::gather_from_group(x, dim, group_name, dim_size);
}

at::Tensor gather_from_sequence(const at::Tensor& x,
                                std::int64_t dim,
                                std::string_view group_name,
                                std::optional<std::int64_t> dim_size) {
  return dispatch::gather_from_sequence(x, dim, group_name, dim_size);
}

at::Tensor reduce_scatter_to_sequence(const at::Tensor& x,
                                      std::int64_t dim,
                                      std::string_view group_name) {
  return dispatch::reduce_scatter_to_sequence(x, dim, group_name);
}

at::Tensor all_to_all(const at::Tensor& x,
                      std::int64_t split_dim,
                      std::int64_t cat_dim,
                      std::string_view group_name,
                      std::optional<std::int64_t> cat_size) {
  return dispatch::all_to_all(x, split_dim, cat_dim, group_name, cat_size);
}

at::Tensor ring_attention(const at::Tensor& query,
                          const at::Tensor& key,
                          const at::Tensor& value,
                          std::string_view group_name,
                          const SequenceAttentionOptions& options,
                          std::string_view order) {
  return dispatch::ring_attention(query,
                                  key,
                                  value,
                                  group_name,
                                  options.is_causal,
                                  options.scale,
                                  options.sequence_size,
                                  order,
                                  options.window,
                                  options.document_offsets);
}

at::Tensor ulysses_attention(const at::Tensor& query,
                             const at::Tensor& key,
                             const at::Tensor& value,
                             std::string_view group_name,
                             const SequenceAttentionOptions& options,
                             std::string_view order,
                             std::string_view ring_group_name) {
  return dispatch::ulysses_attention(query,
                                     key,
                                     value,
                                     group_name,
                                     options.is_causal,
                                     options.scale,
                                     options.sequence_size,
                                     options.window,
                                     options.document_offsets,
                                     order,
                                     ring_group_name);
}

at::Tensor grouped_linear(const at::Tensor& x,
                          const at::Tensor& weight,
                          const at::Tensor& counts,
                          const std::optional<at::Tensor>& bias) {
  return dispatch::grouped_linear(x, weight, counts, bias);
}

DispatchedRows moe_dispatch(const at::Tensor& x,
                            const at::Tensor& expert_ids,
                            std::int64_t num_experts,
                            std::string_view group_name) {
  auto [rows, counts, order, sent, received] =
      dispatch::moe_dispatch(x, expert_ids, num_experts, group_name);
  return {rows, counts, order, sent, received};
}

at::Tensor moe_combine(const at::Tensor& rows,
                       const at::Tensor& weights,
                       const at::Tensor& order,
                       const at::Tensor& sent,
                       const at::Tensor& received,
                       std::string_view group_name) {
  return dispatch::moe_combine(rows, weights, order, sent, received, group_name);
}

std::string_view built_for_torch() { return WEFT_TORCH_VERSION; }

}  // namespace weft::ops
