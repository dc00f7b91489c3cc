// Kernels, autograd and Meta kernels of ring_attention. The autograd function calls registered
// operators, one for the forward with the tensors that the backward needs and one for the backward,
// so that compiled and exported graphs contain the communication.

#include "autograd_support.h"
#include "dispatch.h"
#include "group_collectives.h"
#include "ring_attention.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace weft::ops {

namespace {

using OptionalScale = std::optional<double>;
using OptionalTensor = dispatch::OptionalTensor;
using OptionalInt = std::optional<std::int64_t>;
using OptionalSize = std::optional<c10::SymInt>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

RingOptions options_of(std::string_view group_name,
                       bool is_causal,
                       const OptionalScale& scale,
                       const OptionalSize& sequence_size,
                       std::string_view order,
                       const OptionalInt& window,
                       const OptionalTensor& document_offsets) {
  return {std::string(group_name),
          {is_causal, window, document_offsets},
          scale,
          sequence_size,
          std::string(order)};
}

std::tuple<at::Tensor, at::Tensor> saving_kernel(const at::Tensor& query,
                                                 const at::Tensor& key,
                                                 const at::Tensor& value,
                                                 std::string_view group_name,
                                                 bool is_causal,
                                                 OptionalScale scale,
                                                 OptionalSize sequence_size,
                                                 std::string_view order,
                                                 OptionalInt window,
                                                 const OptionalTensor& document_offsets) {
  auto [out, lse] = ring_attention_forward(
      query,
      key,
      value,
      options_of(group_name, is_causal, scale, sequence_size, order, window, document_offsets));
  return {std::move(out), std::move(lse)};
}

at::Tensor kernel(const at::Tensor& query,
                  const at::Tensor& key,
                  const at::Tensor& value,
                  std::string_view group_name,
                  bool is_causal,
                  OptionalScale scale,
                  OptionalSize sequence_size,
                  std::string_view order,
                  OptionalInt window,
                  const OptionalTensor& document_offsets) {
  return ring_attention_forward(
             query,
             key,
             value,
             options_of(
                 group_name, is_causal, scale, sequence_size, order, window, document_offsets))
      .out;
}

ThreeTensors backward_kernel(const at::Tensor& grad_out,
                             const at::Tensor& query,
                             const at::Tensor& key,
                             const at::Tensor& value,
                             const at::Tensor& out,
                             const at::Tensor& lse,
                             std::string_view group_name,
                             bool is_causal,
                             OptionalScale scale,
                             OptionalSize sequence_size,
                             std::string_view order,
                             OptionalInt window,
                             const OptionalTensor& document_offsets) {
  auto gradients = ring_attention_gradients(
      grad_out,
      query,
      key,
      value,
      {out, lse},
      options_of(group_name, is_causal, scale, sequence_size, order, window, document_offsets));
  return {std::move(gradients.query), std::move(gradients.key), std::move(gradients.value)};
}

class RingAttention : public torch::autograd::Function<RingAttention> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& query,
                            const at::Tensor& key,
                            const at::Tensor& value,
                            const std::string& group_name,
                            bool is_causal,
                            const OptionalScale& scale,
                            const OptionalSize& sequence_size,
                            const std::string& order,
                            const OptionalInt& window,
                            const OptionalTensor& document_offsets) {
    auto& saved = ctx->saved_data;
    saved["group_name"] = group_name;
    saved["is_causal"] = is_causal;
    saved["scale"] = scale;
    if (sequence_size.has_value()) {
      saved["sequence_size"] = *sequence_size;
    }
    saved["order"] = order;
    saved["window"] = window;
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [out, lse] = dispatch::ring_attention_saving(query,
                                                      key,
                                                      value,
                                                      group_name,
                                                      is_causal,
                                                      scale,
                                                      sequence_size,
                                                      order,
                                                      window,
                                                      document_offsets);
    ctx->save_for_backward({query, key, value, out, lse, document_offsets.value_or(at::Tensor())});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kRingAttention);
    const auto tensors = ctx->get_saved_variables();
    const auto& saved = ctx->saved_data;
    const auto size = saved.find("sequence_size");
    auto [grad_query, grad_key, grad_value] = dispatch::ring_attention_backward(
        grads[0],
        tensors[0],
        tensors[1],
        tensors[2],
        tensors[3],
        tensors[4],
        saved.at("group_name").toStringRef(),
        saved.at("is_causal").toBool(),
        saved.at("scale").toOptional<double>(),
        size == saved.end() ? OptionalSize() : OptionalSize(size->second.toSymInt()),
        saved.at("order").toStringRef(),
        saved.at("window").toOptional<std::int64_t>(),
        tensors[5].defined() ? OptionalTensor(tensors[5]) : std::nullopt);
    variable_list result(10);
    result[0] = std::move(grad_query);
    result[1] = std::move(grad_key);
    result[2] = std::move(grad_value);
    return result;
  }
};

at::Tensor autograd_kernel(const at::Tensor& query,
                           const at::Tensor& key,
                           const at::Tensor& value,
                           std::string_view group_name,
                           bool is_causal,
                           OptionalScale scale,
                           OptionalSize sequence_size,
                           std::string_view order,
                           OptionalInt window,
                           const OptionalTensor& document_offsets) {
  if (!torch::autograd::compute_requires_grad(query, key, value)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::ring_attention(query,
                                    key,
                                    value,
                                    group_name,
                                    is_causal,
                                    scale,
                                    std::move(sequence_size),
                                    order,
                                    window,
                                    document_offsets);
  }
  return RingAttention::apply(query,
                              key,
                              value,
                              std::string(group_name),
                              is_causal,
                              scale,
                              sequence_size,
                              std::string(order),
                              window,
                              document_offsets);
}

std::tuple<at::Tensor, at::Tensor> saving_meta_kernel(const at::Tensor& query,
                                                      const at::Tensor& key,
                                                      const at::Tensor& value,
                                                      std::string_view group_name,
                                                      bool is_causal,
                                                      OptionalScale scale,
                                                      OptionalSize sequence_size,
                                                      std::string_view order,
                                                      OptionalInt window,
                                                      const OptionalTensor& document_offsets) {
  checked_ring_arguments(
      query,
      key,
      value,
      options_of(group_name, is_causal, scale, sequence_size, order, window, document_offsets),
      rank_in(kRingAttention, group_name));
  auto result = empty_attention(query);
  return {std::move(result.out), std::move(result.lse)};
}

at::Tensor meta_kernel(const at::Tensor& query,
                       const at::Tensor& key,
                       const at::Tensor& value,
                       std::string_view group_name,
                       bool is_causal,
                       OptionalScale scale,
                       OptionalSize sequence_size,
                       std::string_view order,
                       OptionalInt window,
                       const OptionalTensor& document_offsets) {
  return std::get<0>(saving_meta_kernel(query,
                                        key,
                                        value,
                                        group_name,
                                        is_causal,
                                        scale,
                                        std::move(sequence_size),
                                        order,
                                        window,
                                        document_offsets));
}

ThreeTensors backward_meta_kernel(const at::Tensor& /*grad_out*/,
                                  const at::Tensor& query,
                                  const at::Tensor& key,
                                  const at::Tensor& value,
                                  const at::Tensor& /*out*/,
                                  const at::Tensor& /*lse*/,
                                  std::string_view /*group_name*/,
                                  bool /*is_causal*/,
                                  OptionalScale /*scale*/,
                                  OptionalSize /*sequence_size*/,
                                  std::string_view /*order*/,
                                  OptionalInt /*window*/,
                                  const OptionalTensor& /*document_offsets*/) {
  return {at::empty_symint(query.sym_sizes(), query.options()),
          at::empty_symint(key.sym_sizes(), key.options()),
          at::empty_symint(value.sym_sizes(), value.options())};
}

void register_ring_kernels(torch::Library& m) {
  m.impl("ring_attention", TORCH_FN(kernel));
  m.impl("_ring_attention", TORCH_FN(saving_kernel));
  m.impl("_ring_attention_backward", TORCH_FN(backward_kernel));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { register_ring_kernels(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_ring_kernels(m); }
TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("ring_attention", TORCH_FN(meta_kernel));
  m.impl("_ring_attention", TORCH_FN(saving_meta_kernel));
  m.impl("_ring_attention_backward", TORCH_FN(backward_meta_kernel));
}
TORCH_LIBRARY_IMPL(weft, Autograd, m) { m.impl("ring_attention", TORCH_FN(autograd_kernel)); }

}  // namespace weft::ops
