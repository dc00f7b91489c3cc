// Autograd and Meta kernels of all_gather_linear and linear_reduce_scatter. all_gather_linear does
// not save the gathered input: its backward gathers the saved shard again for the weight's
// gradient. Each backward is one operator; only the gradient of all_gather_linear's bias, which
// needs no communication, is computed outside of it.

#include "autograd_support.h"
#include "dispatch.h"
#include "group_collectives.h"
#include "shape.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>

namespace weft::ops {

namespace {

constexpr std::string_view kGatherLinear = "weft::all_gather_linear";
constexpr std::string_view kLinearScatter = "weft::linear_reduce_scatter";

using OptionalSize = std::optional<c10::SymInt>;

// Saves the state that both backwards need. The bias, if present, is input 2; autograd::Function
// does not count absent optional inputs.
void save(AutogradContext* ctx,
          const at::Tensor& x,
          const at::Tensor& weight,
          const OptionalTensor& bias,
          std::int64_t dim,
          const std::string& group_name) {
  ctx->save_for_backward({x, weight});
  ctx->saved_data["has_bias"] = bias.has_value();
  ctx->saved_data["dim"] = dim;
  ctx->saved_data["group_name"] = group_name;
}

bool wants_bias_grad(AutogradContext* ctx) {
  return ctx->saved_data.at("has_bias").toBool() && ctx->needs_input_grad(2);
}

// Returns the saved dim, counted from 0.
std::int64_t dim_of(AutogradContext* ctx, std::string_view op, const at::Tensor& x) {
  return checked_dim(op, x, ctx->saved_data.at("dim").toInt());
}

class AllGatherLinear : public torch::autograd::Function<AllGatherLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            const at::Tensor& weight,
                            const OptionalTensor& bias,
                            std::int64_t gather_dim,
                            const std::string& group_name,
                            const OptionalSize& dim_size) {
    save(ctx, x, weight, bias, gather_dim, group_name);
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::all_gather_linear(x, weight, bias, gather_dim, group_name, dim_size);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kGatherLinear);
    const auto saved = ctx->get_saved_variables();
    const bool wants_x = ctx->needs_input_grad(0);
    const bool wants_weight = ctx->needs_input_grad(1);
    const auto [grad_x, grad_weight] =
        dispatch::all_gather_linear_backward(grads[0],
                                             saved[0],
                                             saved[1],
                                             dim_of(ctx, kGatherLinear, saved[0]),
                                             ctx->saved_data.at("group_name").toStringRef(),
                                             wants_x,
                                             wants_weight);
    return {wants_x ? grad_x : at::Tensor(),
            wants_weight ? grad_weight : at::Tensor(),
            wants_bias_grad(ctx) ? bias_grad(grads[0]) : at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

class LinearReduceScatter : public torch::autograd::Function<LinearReduceScatter> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            const at::Tensor& weight,
                            const OptionalTensor& bias,
                            std::int64_t scatter_dim,
                            const std::string& group_name) {
    save(ctx, x, weight, bias, scatter_dim, group_name);
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::linear_reduce_scatter(x, weight, bias, scatter_dim, group_name);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kLinearScatter);
    const auto saved = ctx->get_saved_variables();
    const bool wants_x = ctx->needs_input_grad(0);
    const bool wants_weight = ctx->needs_input_grad(1);
    const bool wants_bias = wants_bias_grad(ctx);
    const auto [grad_x, grad_weight, grad_bias] =
        dispatch::linear_reduce_scatter_backward(grads[0],
                                                 saved[0],
                                                 saved[1],
                                                 dim_of(ctx, kLinearScatter, saved[0]),
                                                 ctx->saved_data.at("group_name").toStringRef(),
                                                 wants_x,
                                                 wants_weight,
                                                 wants_bias);
    return {wants_x ? grad_x : at::Tensor(),
            wants_weight ? grad_weight : at::Tensor(),
            wants_bias ? grad_bias : at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

at::Tensor all_gather_linear_autograd(const at::Tensor& x,
                                      const at::Tensor& weight,
                                      const OptionalTensor& bias,
                                      std::int64_t gather_dim,
                                      std::string_view group_name,
                                      OptionalSize dim_size) {
  return AllGatherLinear::apply(x, weight, bias, gather_dim, std::string(group_name), dim_size);
}

at::Tensor linear_reduce_scatter_autograd(const at::Tensor& x,
                                          const at::Tensor& weight,
                                          const OptionalTensor& bias,
                                          std::int64_t scatter_dim,
                                          std::string_view group_name) {
  return LinearReduceScatter::apply(x, weight, bias, scatter_dim, std::string(group_name));
}

at::Tensor all_gather_linear_meta(const at::Tensor& x,
                                  const at::Tensor& weight,
                                  const OptionalTensor& bias,
                                  std::int64_t gather_dim,
                                  std::string_view group_name,
                                  OptionalSize dim_size) {
  const auto group_rank = rank_in(kGatherLinear, group_name);
  return at::empty_symint(
      all_gather_linear_shape(x, weight, bias, gather_dim, dim_size, group_rank), x.options());
}

at::Tensor linear_reduce_scatter_meta(const at::Tensor& x,
                                      const at::Tensor& weight,
                                      const OptionalTensor& bias,
                                      std::int64_t scatter_dim,
                                      std::string_view group_name) {
  const auto group_rank = rank_in(kLinearScatter, group_name);
  return at::empty_symint(linear_reduce_scatter_shape(x, weight, bias, scatter_dim, group_rank),
                          x.options());
}

// Returns an uninitialized tensor like `tensor` if it is wanted, else one of shape [0].
at::Tensor like(const at::Tensor& tensor, bool is_wanted) {
  return is_wanted ? at::empty_symint(tensor.sym_sizes(), tensor.options())
                   : at::empty({0}, tensor.options());
}

std::tuple<at::Tensor, at::Tensor> all_gather_linear_backward_meta(const at::Tensor& /*grad_y*/,
                                                                   const at::Tensor& x,
                                                                   const at::Tensor& weight,
                                                                   std::int64_t /*dim*/,
                                                                   std::string_view /*group_name*/,
                                                                   bool wants_x,
                                                                   bool wants_weight) {
  return {like(x, wants_x), like(weight, wants_weight)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_reduce_scatter_backward_meta(
    const at::Tensor& /*grad_y*/,
    const at::Tensor& x,
    const at::Tensor& weight,
    std::int64_t /*dim*/,
    std::string_view /*group_name*/,
    bool wants_x,
    bool wants_weight,
    bool wants_bias) {
  auto grad_bias = at::empty_symint({wants_bias ? weight.sym_size(0) : 0}, weight.options());
  return {like(x, wants_x), like(weight, wants_weight), grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("all_gather_linear", TORCH_FN(all_gather_linear_meta));
  m.impl("linear_reduce_scatter", TORCH_FN(linear_reduce_scatter_meta));
  m.impl("_all_gather_linear_backward", TORCH_FN(all_gather_linear_backward_meta));
  m.impl("_linear_reduce_scatter_backward", TORCH_FN(linear_reduce_scatter_backward_meta));
}
TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("all_gather_linear", TORCH_FN(all_gather_linear_autograd));
  m.impl("linear_reduce_scatter", TORCH_FN(linear_reduce_scatter_autograd));
}

}  // namespace weft::ops
