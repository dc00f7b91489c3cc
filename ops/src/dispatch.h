#pragma once

// Typed calls of weft's registered operators through the dispatcher. A call made below autograd
// (under at::AutoDispatchBelowADInplaceOrView) reaches the device kernel, or the tracer where one
// is active. <weft/ops/operators.h> describes the arguments; schema.cpp describes the operators
// with a leading underscore.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace weft::ops::dispatch {

// The qualified name of an operator as a template argument.
template <std::size_t kSize>
struct OperatorName {
  // NOLINTNEXTLINE(google-explicit-constructor): literals convert to it.
  consteval OperatorName(const char (&literal)[kSize]) { std::copy_n(literal, kSize, text); }

  char text[kSize]{};
};

// A registered operator, called like a function. Its handle is looked up in the first call.
template <OperatorName kName, typename Signature>
class Operator;

template <OperatorName kName, typename Result, typename... Arguments>
class Operator<kName, Result(Arguments...)> {
 public:
  static constexpr const char* name() { return kName.text; }

  Result operator()(Arguments... arguments) const {
    static const auto handle = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow(name(), /*overload_name=*/"")
                                   .template typed<Result(Arguments...)>();
    return handle.call(std::forward<Arguments>(arguments)...);
  }
};

using OptionalTensor = std::optional<at::Tensor>;
using at::Tensor;
using at::TensorList;
using c10::SymInt;
using std::int64_t;
using std::optional;
using std::string_view;
using std::tuple;
using std::vector;

inline constexpr Operator<"weft::column_row_mlp",
                          Tensor(const Tensor& x,
                                 const Tensor& w1,
                                 const Tensor& w2,
                                 const OptionalTensor& w3,
                                 const OptionalTensor& b1,
                                 const OptionalTensor& b2,
                                 const OptionalTensor& b3,
                                 string_view activation,
                                 string_view group_name,
                                 bool recompute,
                                 optional<int64_t> sequence_dim,
                                 optional<SymInt> sequence_size)>
    column_row_mlp;

inline constexpr Operator<"weft::_column_row_mlp_saving",
                          tuple<Tensor, Tensor, Tensor>(const Tensor& x,
                                                        const Tensor& w1,
                                                        const Tensor& w2,
                                                        const OptionalTensor& w3,
                                                        const OptionalTensor& b1,
                                                        const OptionalTensor& b2,
                                                        const OptionalTensor& b3,
                                                        string_view activation,
                                                        string_view group_name,
                                                        optional<int64_t> sequence_dim,
                                                        optional<SymInt> sequence_size,
                                                        bool joins)>
    column_row_mlp_saving;

inline constexpr Operator<
    "weft::column_linear",
    Tensor(
        const Tensor& x, const Tensor& weight, const OptionalTensor& bias, string_view group_name)>
    column_linear;
inline constexpr Operator<
    "weft::row_linear",
    Tensor(
        const Tensor& x, const Tensor& weight, const OptionalTensor& bias, string_view group_name)>
    row_linear;

inline constexpr Operator<"weft::all_gather_linear",
                          Tensor(const Tensor& x,
                                 const Tensor& weight,
                                 const OptionalTensor& bias,
                                 int64_t gather_dim,
                                 string_view group_name,
                                 optional<SymInt> dim_size)>
    all_gather_linear;
inline constexpr Operator<"weft::linear_reduce_scatter",
                          Tensor(const Tensor& x,
                                 const Tensor& weight,
                                 const OptionalTensor& bias,
                                 int64_t scatter_dim,
                                 string_view group_name)>
    linear_reduce_scatter;
inline constexpr Operator<"weft::_all_gather_linear_backward",
                          tuple<Tensor, Tensor>(const Tensor& grad_y,
                                                const Tensor& x,
                                                const Tensor& weight,
                                                int64_t dim,
                                                string_view group_name,
                                                bool wants_x,
                                                bool wants_weight)>
    all_gather_linear_backward;
inline constexpr Operator<"weft::_linear_reduce_scatter_backward",
                          tuple<Tensor, Tensor, Tensor>(const Tensor& grad_y,
                                                        const Tensor& x,
                                                        const Tensor& weight,
                                                        int64_t dim,
                                                        string_view group_name,
                                                        bool wants_x,
                                                        bool wants_weight,
                                                        bool wants_bias)>
    linear_reduce_scatter_backward;

inline constexpr Operator<"weft::sharded_linear",
                          Tensor(const Tensor& x,
                                 const Tensor& weight,
                                 const OptionalTensor& bias,
                                 string_view group_name,
                                 optional<SymInt> out_features)>
    sharded_linear;
inline constexpr Operator<"weft::_sharded_linear_input_grad",
                          Tensor(
                              const Tensor& grad_y, const Tensor& weight, string_view group_name)>
    sharded_linear_input_grad;
inline constexpr Operator<"weft::_sharded_linear_shard_grad",
                          Tensor(const Tensor& grad_y, const Tensor& x, string_view group_name)>
    sharded_linear_shard_grad;

inline constexpr Operator<"weft::vocab_parallel_embedding",
                          Tensor(const Tensor& ids,
                                 const Tensor& weight,
                                 int64_t vocab_start,
                                 string_view group_name,
                                 optional<int64_t> vocab_size)>
    vocab_parallel_embedding;
inline constexpr Operator<
    "weft::_vocab_embedding_backward",
    Tensor(const Tensor& grad, const Tensor& ids, SymInt num_rows, int64_t vocab_start)>
    vocab_embedding_backward;

inline constexpr Operator<"weft::vocab_parallel_cross_entropy",
                          Tensor(const Tensor& logits,
                                 const Tensor& target,
                                 int64_t vocab_start,
                                 string_view group_name,
                                 optional<int64_t> vocab_size,
                                 int64_t ignore_index,
                                 double label_smoothing,
                                 string_view reduction)>
    vocab_parallel_cross_entropy;
inline constexpr Operator<"weft::vocab_parallel_linear_cross_entropy",
                          Tensor(const Tensor& x,
                                 const Tensor& weight,
                                 const Tensor& target,
                                 int64_t vocab_start,
                                 string_view group_name,
                                 optional<int64_t> vocab_size,
                                 int64_t ignore_index,
                                 double label_smoothing,
                                 string_view reduction)>
    vocab_parallel_linear_cross_entropy;
inline constexpr Operator<"weft::_vocab_cross_entropy",
                          tuple<Tensor, Tensor>(const Tensor& logits,
                                                const Tensor& target,
                                                int64_t vocab_start,
                                                string_view group_name,
                                                optional<int64_t> vocab_size,
                                                int64_t ignore_index,
                                                double label_smoothing)>
    vocab_cross_entropy;
inline constexpr Operator<"weft::_vocab_cross_entropy_backward",
                          Tensor(const Tensor& grad,
                                 const Tensor& logits,
                                 const Tensor& target,
                                 const Tensor& normalizers,
                                 int64_t vocab_start,
                                 int64_t num_classes,
                                 int64_t ignore_index,
                                 double label_smoothing)>
    vocab_cross_entropy_backward;
inline constexpr Operator<"weft::_linear_cross_entropy",
                          tuple<Tensor, Tensor>(const Tensor& x,
                                                const Tensor& weight,
                                                const Tensor& target,
                                                int64_t vocab_start,
                                                string_view group_name,
                                                optional<int64_t> vocab_size,
                                                int64_t ignore_index,
                                                double label_smoothing)>
    linear_cross_entropy;
inline constexpr Operator<"weft::_linear_cross_entropy_backward",
                          tuple<Tensor, Tensor>(const Tensor& grad,
                                                const Tensor& x,
                                                const Tensor& weight,
                                                const Tensor& target,
                                                const Tensor& normalizers,
                                                int64_t vocab_start,
                                                int64_t num_classes,
                                                int64_t ignore_index,
                                                double label_smoothing,
                                                bool wants_x,
                                                bool wants_weight)>
    linear_cross_entropy_backward;

inline constexpr Operator<"weft::_cross_entropy_statistics",
                          Tensor(const Tensor& logits,
                                 const Tensor& target,
                                 int64_t vocab_start,
                                 int64_t ignore_index,
                                 bool wants_sum)>
    cross_entropy_statistics;
inline constexpr Operator<"weft::_cross_entropy_gradient",
                          void(const Tensor& grad_logits,
                               const Tensor& grad_losses,
                               const Tensor& logits,
                               const Tensor& target,
                               const Tensor& normalizers,
                               int64_t vocab_start,
                               int64_t num_classes,
                               int64_t ignore_index,
                               double label_smoothing)>
    cross_entropy_gradient;

inline constexpr Operator<
    "weft::rms_norm",
    Tensor(const Tensor& x, const OptionalTensor& weight, string_view group_name, double eps)>
    rms_norm;

inline constexpr Operator<"weft::layer_norm",
                          Tensor(const Tensor& x,
                                 const OptionalTensor& weight,
                                 const OptionalTensor& bias,
                                 string_view group_name,
                                 double eps)>
    layer_norm;

inline constexpr Operator<"weft::add_rms_norm",
                          tuple<Tensor, Tensor>(const Tensor& x,
                                                const Tensor& residual,
                                                const OptionalTensor& weight,
                                                string_view group_name,
                                                double eps)>
    add_rms_norm;

inline constexpr Operator<"weft::add_layer_norm",
                          tuple<Tensor, Tensor>(const Tensor& x,
                                                const Tensor& residual,
                                                const OptionalTensor& weight,
                                                const OptionalTensor& bias,
                                                string_view group_name,
                                                double eps)>
    add_layer_norm;

inline constexpr Operator<"weft::_norm",
                          tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor& x,
                                                                const OptionalTensor& residual,
                                                                const OptionalTensor& weight,
                                                                const OptionalTensor& bias,
                                                                bool centered,
                                                                double eps)>
    norm;

inline constexpr Operator<"weft::_norm_backward",
                          tuple<Tensor, Tensor>(const Tensor& grad_y,
                                                const OptionalTensor& grad_sum,
                                                const Tensor& norm_input,
                                                const OptionalTensor& weight,
                                                const Tensor& mean,
                                                const Tensor& rstd,
                                                bool centered,
                                                bool wants_input,
                                                int64_t num_params)>
    norm_backward;

inline constexpr Operator<
    "weft::pipeline_send",
    Tensor(TensorList tensors, int64_t peer, int64_t channel, string_view group_name)>
    pipeline_send;

inline constexpr Operator<
    "weft::pipeline_recv",
    Tensor(TensorList like, int64_t peer, int64_t channel, string_view group_name)>
    pipeline_recv;

inline constexpr Operator<"weft::pipeline_wait", vector<Tensor>(const Tensor& token)> pipeline_wait;

inline constexpr Operator<"weft::pipeline_flush", void(string_view group_name)> pipeline_flush;

inline constexpr Operator<"weft::join", Tensor(const Tensor& x, TensorList tokens)> join;

inline constexpr Operator<"weft::dropout",
                          Tensor(const Tensor& x,
                                 const Tensor& seed,
                                 double p,
                                 string_view group_name,
                                 optional<int64_t> dim,
                                 optional<SymInt> dim_size)>
    dropout;

inline constexpr Operator<"weft::_dropout_of_shard",
                          Tensor(const Tensor& x,
                                 int64_t seed,
                                 double p,
                                 int64_t inner,
                                 int64_t size,
                                 int64_t begin,
                                 int64_t full_size)>
    dropout_of_shard;

inline constexpr Operator<"weft::copy_to_group", Tensor(const Tensor& x, string_view group_name)>
    copy_to_group;
inline constexpr Operator<"weft::reduce_from_group",
                          Tensor(const Tensor& x, string_view group_name)>
    reduce_from_group;

inline constexpr Operator<"weft::scatter_to_group",
                          Tensor(const Tensor& x, int64_t dim, string_view group_name)>
    scatter_to_group;
inline constexpr Operator<
    "weft::gather_from_group",
    Tensor(const Tensor& x, int64_t dim, string_view group_name, optional<SymInt> dim_size)>
    gather_from_group;
inline constexpr Operator<
    "weft::gather_from_sequence",
    Tensor(const Tensor& x, int64_t dim, string_view group_name, optional<SymInt> dim_size)>
    gather_from_sequence;
inline constexpr Operator<"weft::reduce_scatter_to_sequence",
                          Tensor(const Tensor& x, int64_t dim, string_view group_name)>
    reduce_scatter_to_sequence;
inline constexpr Operator<"weft::all_to_all",
                          Tensor(const Tensor& x,
                                 int64_t split_dim,
                                 int64_t cat_dim,
                                 string_view group_name,
                                 optional<SymInt> cat_size)>
    all_to_all;

inline constexpr Operator<"weft::ring_attention",
                          Tensor(const Tensor& query,
                                 const Tensor& key,
                                 const Tensor& value,
                                 string_view group_name,
                                 bool is_causal,
                                 optional<double> scale,
                                 optional<SymInt> sequence_size,
                                 string_view order,
                                 optional<std::int64_t> window,
                                 const OptionalTensor& document_offsets)>
    ring_attention;
inline constexpr Operator<"weft::_ring_attention",
                          tuple<Tensor, Tensor>(const Tensor& query,
                                                const Tensor& key,
                                                const Tensor& value,
                                                string_view group_name,
                                                bool is_causal,
                                                optional<double> scale,
                                                optional<SymInt> sequence_size,
                                                string_view order,
                                                optional<std::int64_t> window,
                                                const OptionalTensor& document_offsets)>
    ring_attention_saving;
inline constexpr Operator<"weft::_ring_attention_backward",
                          tuple<Tensor, Tensor, Tensor>(const Tensor& grad_out,
                                                        const Tensor& query,
                                                        const Tensor& key,
                                                        const Tensor& value,
                                                        const Tensor& out,
                                                        const Tensor& lse,
                                                        string_view group_name,
                                                        bool is_causal,
                                                        optional<double> scale,
                                                        optional<SymInt> sequence_size,
                                                        string_view order,
                                                        optional<std::int64_t> window,
                                                        const OptionalTensor& document_offsets)>
    ring_attention_backward;
inline constexpr Operator<"weft::ulysses_attention",
                          Tensor(const Tensor& query,
                                 const Tensor& key,
                                 const Tensor& value,
                                 string_view group_name,
                                 bool is_causal,
                                 optional<double> scale,
                                 optional<SymInt> sequence_size,
                                 optional<std::int64_t> window,
                                 const OptionalTensor& document_offsets,
                                 string_view order,
                                 string_view ring_group_name)>
    ulysses_attention;
inline constexpr Operator<"weft::_check_document_offsets",
                          void(
                              const Tensor& document_offsets, SymInt sequence_size, string_view op)>
    check_document_offsets;

inline constexpr Operator<
    "weft::grouped_linear",
    Tensor(const Tensor& x, const Tensor& weight, const Tensor& counts, const OptionalTensor& bias)>
    grouped_linear;
inline constexpr Operator<"weft::_grouped_weight_grad",
                          Tensor(const Tensor& grad_y, const Tensor& x, const Tensor& counts)>
    grouped_weight_grad;
inline constexpr Operator<"weft::_grouped_bias_grad",
                          Tensor(const Tensor& grad_y, const Tensor& counts)>
    grouped_bias_grad;

inline constexpr Operator<
    "weft::moe_dispatch",
    tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
        const Tensor& x, const Tensor& expert_ids, int64_t num_experts, string_view group_name)>
    moe_dispatch;
inline constexpr Operator<
    "weft::_moe_dispatch",
    tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
        const Tensor& x, const Tensor& expert_ids, int64_t num_experts, string_view group_name)>
    moe_dispatch_saving;
inline constexpr Operator<"weft::_moe_dispatch_backward",
                          Tensor(const Tensor& grad_rows,
                                 const Tensor& order,
                                 const Tensor& sent,
                                 const Tensor& received,
                                 SymInt num_tokens,
                                 string_view group_name)>
    moe_dispatch_backward;
inline constexpr Operator<"weft::moe_combine",
                          Tensor(const Tensor& rows,
                                 const Tensor& weights,
                                 const Tensor& order,
                                 const Tensor& sent,
                                 const Tensor& received,
                                 string_view group_name)>
    moe_combine;
inline constexpr Operator<"weft::_moe_combine",
                          tuple<Tensor, Tensor>(const Tensor& rows,
                                                const Tensor& weights,
                                                const Tensor& order,
                                                const Tensor& sent,
                                                const Tensor& received,
                                                string_view group_name)>
    moe_combine_saving;
inline constexpr Operator<"weft::_moe_combine_backward",
                          tuple<Tensor, Tensor>(const Tensor& grad_y,
                                                const Tensor& weights,
                                                const Tensor& returned,
                                                const Tensor& order,
                                                const Tensor& sent,
                                                const Tensor& received,
                                                SymInt num_rows,
                                                string_view group_name,
                                                bool wants_rows,
                                                bool wants_weights)>
    moe_combine_backward;

inline constexpr Operator<"weft::adam_step_",
                          void(const Tensor& parameter,
                               const Tensor& grad,
                               const Tensor& exp_avg,
                               const OptionalTensor& exp_avg_scale,
                               const Tensor& exp_avg_sq,
                               const OptionalTensor& exp_avg_sq_scale,
                               const OptionalTensor& low_bits,
                               int64_t step,
                               double lr,
                               double beta1,
                               double beta2,
                               double eps,
                               double weight_decay,
                               bool decoupled_weight_decay,
                               bool maximize,
                               int64_t seed,
                               int64_t row,
                               int64_t column,
                               int64_t full_columns)>
    adam_step_;
inline constexpr Operator<"weft::momentum_step_",
                          void(const Tensor& parameter,
                               const Tensor& grad,
                               const Tensor& momentum_buffer,
                               const OptionalTensor& momentum_scale,
                               const OptionalTensor& low_bits,
                               int64_t step,
                               double lr,
                               double momentum,
                               double dampening,
                               double weight_decay,
                               bool nesterov,
                               bool maximize,
                               int64_t seed,
                               int64_t row,
                               int64_t column,
                               int64_t full_columns)>
    momentum_step_;

inline constexpr Operator<"weft::_activation", Tensor(const Tensor& x, string_view activation)>
    activation;
inline constexpr Operator<"weft::_activation_backward",
                          tuple<Tensor, Tensor>(
                              const Tensor& grad, const Tensor& x, string_view activation)>
    activation_backward;
inline constexpr Operator<"weft::_gated_activation",
                          Tensor(const Tensor& gate, const Tensor& up, string_view activation)>
    gated_activation;
inline constexpr Operator<
    "weft::_gated_activation_backward",
    tuple<Tensor, Tensor, Tensor>(
        const Tensor& grad, const Tensor& gate, const Tensor& up, string_view activation)>
    gated_activation_backward;
inline constexpr Operator<"weft::_gate_up_activation",
                          Tensor(const Tensor& gate_up, string_view activation)>
    gate_up_activation;
inline constexpr Operator<"weft::_gate_up_activation_backward",
                          tuple<Tensor, Tensor>(
                              const Tensor& grad, const Tensor& gate_up, string_view activation)>
    gate_up_activation_backward;

}  // namespace weft::ops::dispatch
