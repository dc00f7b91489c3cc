#pragma once

// Typed calls of weft's registered operators through the dispatcher. A call made below autograd
// (under at::AutoDispatchBelowADInplaceOrView) reaches the device kernel, or the tracer where one
// is active.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace weft::ops::dispatch {

using OptionalTensor = std::optional<at::Tensor>;

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
                          std::optional<c10::SymInt> sequence_size);

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
    std::optional<c10::SymInt> sequence_size);

at::Tensor column_linear(const at::Tensor& x,
                         const at::Tensor& weight,
                         const OptionalTensor& bias,
                         std::string_view group_name);
at::Tensor row_linear(const at::Tensor& x,
                      const at::Tensor& weight,
                      const OptionalTensor& bias,
                      std::string_view group_name);

at::Tensor all_gather_linear(const at::Tensor& x,
                             const at::Tensor& weight,
                             const OptionalTensor& bias,
                             std::int64_t gather_dim,
                             std::string_view group_name,
                             std::optional<c10::SymInt> dim_size);
at::Tensor linear_reduce_scatter(const at::Tensor& x,
                                 const at::Tensor& weight,
                                 const OptionalTensor& bias,
                                 std::int64_t scatter_dim,
                                 std::string_view group_name);
std::tuple<at::Tensor, at::Tensor> all_gather_linear_backward(const at::Tensor& grad_y,
                                                              const at::Tensor& x,
                                                              const at::Tensor& weight,
                                                              std::int64_t dim,
                                                              std::string_view group_name,
                                                              bool wants_x,
                                                              bool wants_weight);
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_reduce_scatter_backward(
    const at::Tensor& grad_y,
    const at::Tensor& x,
    const at::Tensor& weight,
    std::int64_t dim,
    std::string_view group_name,
    bool wants_x,
    bool wants_weight,
    bool wants_bias);

at::Tensor sharded_linear(const at::Tensor& x,
                          const at::Tensor& weight,
                          const OptionalTensor& bias,
                          std::string_view group_name,
                          std::optional<c10::SymInt> out_features);
at::Tensor sharded_linear_input_grad(const at::Tensor& grad_y,
                                     const at::Tensor& weight,
                                     std::string_view group_name);
at::Tensor sharded_linear_shard_grad(const at::Tensor& grad_y,
                                     const at::Tensor& x,
                                     std::string_view group_name);

at::Tensor vocab_parallel_embedding(const at::Tensor& ids,
                                    const at::Tensor& weight,
                                    std::int64_t vocab_start,
                                    std::string_view group_name,
                                    std::optional<std::int64_t> vocab_size);
at::Tensor vocab_embedding_backward(const at::Tensor& grad,
                                    const at::Tensor& ids,
                                    c10::SymInt num_rows,
                                    std::int64_t vocab_start);

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits,
                                        const at::Tensor& target,
                                        std::int64_t vocab_start,
                                        std::string_view group_name,
                                        std::optional<std::int64_t> vocab_size,
                                        std::int64_t ignore_index,
                                        double label_smoothing,
                                        std::string_view reduction);
at::Tensor vocab_parallel_linear_cross_entropy(const at::Tensor& x,
                                               const at::Tensor& weight,
                                               const at::Tensor& target,
                                               std::int64_t vocab_start,
                                               std::string_view group_name,
                                               std::optional<std::int64_t> vocab_size,
                                               std::int64_t ignore_index,
                                               double label_smoothing,
                                               std::string_view reduction);
std::tuple<at::Tensor, at::Tensor> vocab_cross_entropy(const at::Tensor& logits,
                                                       const at::Tensor& target,
                                                       std::int64_t vocab_start,
                                                       std::string_view group_name,
                                                       std::optional<std::int64_t> vocab_size,
                                                       std::int64_t ignore_index,
                                                       double label_smoothing);
at::Tensor vocab_cross_entropy_backward(const at::Tensor& grad,
                                        const at::Tensor& logits,
                                        const at::Tensor& target,
                                        const at::Tensor& normalizers,
                                        std::int64_t vocab_start,
                                        std::int64_t num_classes,
                                        std::int64_t ignore_index,
                                        double label_smoothing);
std::tuple<at::Tensor, at::Tensor> linear_cross_entropy(const at::Tensor& x,
                                                        const at::Tensor& weight,
                                                        const at::Tensor& target,
                                                        std::int64_t vocab_start,
                                                        std::string_view group_name,
                                                        std::optional<std::int64_t> vocab_size,
                                                        std::int64_t ignore_index,
                                                        double label_smoothing);
std::tuple<at::Tensor, at::Tensor> linear_cross_entropy_backward(const at::Tensor& grad,
                                                                 const at::Tensor& x,
                                                                 const at::Tensor& weight,
                                                                 const at::Tensor& target,
                                                                 const at::Tensor& normalizers,
                                                                 std::int64_t vocab_start,
                                                                 std::int64_t num_classes,
                                                                 std::int64_t ignore_index,
                                                                 double label_smoothing,
                                                                 bool wants_x,
                                                                 bool wants_weight);

at::Tensor cross_entropy_statistics(const at::Tensor& logits,
                                    const at::Tensor& target,
                                    std::int64_t vocab_start,
                                    std::int64_t ignore_index,
                                    bool wants_sum);
void cross_entropy_gradient(const at::Tensor& gradient,
                            const at::Tensor& grad,
                            const at::Tensor& logits,
                            const at::Tensor& target,
                            const at::Tensor& normalizers,
                            std::int64_t vocab_start,
                            std::int64_t num_classes,
                            std::int64_t ignore_index,
                            double label_smoothing);

at::Tensor rms_norm(const at::Tensor& x,
                    const OptionalTensor& weight,
                    std::string_view group_name,
                    double eps);

at::Tensor layer_norm(const at::Tensor& x,
                      const OptionalTensor& weight,
                      const OptionalTensor& bias,
                      std::string_view group_name,
                      double eps);

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                const at::Tensor& residual,
                                                const OptionalTensor& weight,
                                                std::string_view group_name,
                                                double eps);

std::tuple<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x,
                                                  const at::Tensor& residual,
                                                  const OptionalTensor& weight,
                                                  const OptionalTensor& bias,
                                                  std::string_view group_name,
                                                  double eps);

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm(const at::Tensor& x,
                                                                const OptionalTensor& residual,
                                                                const OptionalTensor& weight,
                                                                const OptionalTensor& bias,
                                                                bool centered,
                                                                double eps);

std::tuple<at::Tensor, at::Tensor> norm_backward(const at::Tensor& grad_y,
                                                 const OptionalTensor& grad_sum,
                                                 const at::Tensor& v,
                                                 const OptionalTensor& weight,
                                                 const at::Tensor& mean,
                                                 const at::Tensor& rstd,
                                                 bool centered,
                                                 bool wants_input,
                                                 std::int64_t num_params);

at::Tensor pipeline_send(at::TensorList tensors,
                         std::int64_t peer,
                         std::int64_t channel,
                         std::string_view group_name);

at::Tensor pipeline_recv(at::TensorList like,
                         std::int64_t peer,
                         std::int64_t channel,
                         std::string_view group_name);

std::vector<at::Tensor> pipeline_wait(const at::Tensor& token);

void pipeline_flush(std::string_view group_name);

at::Tensor join(const at::Tensor& x, at::TensorList tokens);

at::Tensor dropout(const at::Tensor& x,
                   const at::Tensor& seed,
                   double p,
                   std::string_view group_name,
                   std::optional<std::int64_t> dim,
                   std::optional<c10::SymInt> dim_size);

at::Tensor dropout_of_part(const at::Tensor& x,
                           std::int64_t seed,
                           double p,
                           std::int64_t inner,
                           std::int64_t size,
                           std::int64_t begin,
                           std::int64_t whole_size);

at::Tensor copy_to_group(const at::Tensor& x, std::string_view group_name);
at::Tensor reduce_from_group(const at::Tensor& x, std::string_view group_name);

at::Tensor scatter_to_group(const at::Tensor& x, std::int64_t dim, std::string_view group_name);
at::Tensor gather_from_group(const at::Tensor& x,
                             std::int64_t dim,
                             std::string_view group_name,
                             std::optional<c10::SymInt> dim_size);
at::Tensor gather_from_sequence(const at::Tensor& x,
                                std::int64_t dim,
                                std::string_view group_name,
                                std::optional<c10::SymInt> dim_size);
at::Tensor reduce_scatter_to_sequence(const at::Tensor& x,
                                      std::int64_t dim,
                                      std::string_view group_name);
at::Tensor all_to_all(const at::Tensor& x,
                      std::int64_t split_dim,
                      std::int64_t cat_dim,
                      std::string_view group_name,
                      std::optional<c10::SymInt> cat_size);

at::Tensor activation(const at::Tensor& x, std::string_view activation);
std::tuple<at::Tensor, at::Tensor> activation_backward(const at::Tensor& grad,
                                                       const at::Tensor& x,
                                                       std::string_view activation);
at::Tensor gated_activation(const at::Tensor& gate,
                            const at::Tensor& up,
                            std::string_view activation);
std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_activation_backward(
    const at::Tensor& grad,
    const at::Tensor& gate,
    const at::Tensor& up,
    std::string_view activation);

}  // namespace weft::ops::dispatch
