// all_gather_linear and linear_reduce_scatter: the column and the row half of a layer whose input
// and output are cut along another dim than the features, the sequence usually. Kernels and
// gradients; each is made of the other's collectives.
//
//   all_gather_linear      y = gather(x) Wᵀ + b        grad_x = reduce_scatter(grad_y W)
//   linear_reduce_scatter  y = reduce_scatter(x Wᵀ) + b    grad_x = gather(grad_y) W
//
// What was gathered is not kept: the backward gathers the saved part again, while it computes the
// gradient of the input, whose reduce-scatter is on its way while the gradient of the weight is
// computed.

#include "autograd_support.h"
#include "dispatch.h"
#include "group_collectives.h"
#include "shape.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <torch/library.h>

#include <optional>
#include <string>

namespace weft::ops {

namespace {

constexpr std::string_view kGatherLinear = "weft::all_gather_linear";
constexpr std::string_view kLinearScatter = "weft::linear_reduce_scatter";

using OptionalSize = std::optional<c10::SymInt>;

at::Tensor all_gather_linear(const at::Tensor& x,
                             const at::Tensor& weight,
                             const OptionalTensor& bias,
                             std::int64_t gather_dim,
                             std::string_view group_name,
                             OptionalSize dim_size) {
  const auto group = resolve_group(kGatherLinear, std::string(group_name));
  const auto shape =
      all_gather_linear_shape(x, weight, bias, gather_dim, dim_size, place_in(group));
  if (!group) {
    return at::linear(x, weight, bias);
  }
  const auto dim = checked_dim(kGatherLinear, x, gather_dim);
  const auto size = shape[static_cast<std::size_t>(dim)].expect_int();
  return at::linear(all_gather(kGatherLinear, x, dim, size, group), weight, bias);
}

at::Tensor linear_reduce_scatter(const at::Tensor& x,
                                 const at::Tensor& weight,
                                 const OptionalTensor& bias,
                                 std::int64_t scatter_dim,
                                 std::string_view group_name) {
  const auto group = resolve_group(kLinearScatter, std::string(group_name));
  linear_reduce_scatter_shape(x, weight, bias, scatter_dim, place_in(group));
  if (!group) {
    return at::linear(x, weight, bias);
  }
  const auto dim = checked_dim(kLinearScatter, x, scatter_dim);
  auto y = reduce_scatter(kLinearScatter, at::linear(x, weight), dim, group);
  return bias.has_value() ? y.add_(*bias) : y;
}

// What both backwards keep. The bias is input 2 where there is one; autograd::Function does not
// count absent optional inputs.
void keep(AutogradContext* ctx,
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

class AllGatherLinear : public torch::autograd::Function<AllGatherLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            const at::Tensor& weight,
                            const OptionalTensor& bias,
                            std::int64_t gather_dim,
                            const std::string& group_name,
                            const OptionalSize& dim_size) {
    keep(ctx, x, weight, bias, gather_dim, group_name);
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::all_gather_linear(x, weight, bias, gather_dim, group_name, dim_size);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward(kGatherLinear);
    const auto& grad_y = grads[0];
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1];
    const auto& group_name = ctx->saved_data.at("group_name").toStringRef();
    const auto dim = checked_dim(kGatherLinear, x, ctx->saved_data.at("dim").toInt());
    const bool wants_x = ctx->needs_input_grad(0);
    const bool wants_weight = ctx->needs_input_grad(1);
    variable_list result(6);
    if (is_traced(grad_y)) {
      // In the order of the other branch: some ranks may be traced and others not.
      at::Tensor whole_x;
      if (wants_weight) {
        whole_x = dispatch::gather_from_sequence(x, dim, group_name, grad_y.sym_size(dim));
      }
      if (wants_x) {
        result[0] =
            dispatch::reduce_scatter_to_sequence(at::matmul(grad_y, weight), dim, group_name);
      }
      if (wants_weight) {
        result[1] = weight_grad(grad_y, whole_x);
      }
    } else {
      const auto group = resolve_group(kGatherLinear, group_name);
      std::optional<PendingTensor> whole_x, grad_x;
      if (wants_weight) {
        whole_x = start_all_gather(kGatherLinear, x, dim, grad_y.size(dim), group);
      }
      if (wants_x) {
        grad_x = start_reduce_scatter(kGatherLinear, at::matmul(grad_y, weight), dim, group);
      }
      if (wants_weight) {
        result[1] = weight_grad(grad_y, whole_x->get());
      }
      if (wants_x) {
        result[0] = grad_x->get();
      }
    }
    if (wants_bias_grad(ctx)) {
      result[2] = bias_grad(grad_y);
    }
    return result;
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
    keep(ctx, x, weight, bias, scatter_dim, group_name);
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::linear_reduce_scatter(x, weight, bias, scatter_dim, group_name);
  }

  // The bias, whole on every rank, saw this rank's tokens alone: its gradient is over all of them.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward(kLinearScatter);
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1];
    const auto& group_name = ctx->saved_data.at("group_name").toStringRef();
    const auto dim = ctx->saved_data.at("dim").toInt();
    const auto grad_y = dispatch::gather_from_sequence(grads[0], dim, group_name, x.sym_size(dim));
    return {ctx->needs_input_grad(0) ? at::matmul(grad_y, weight) : at::Tensor(),
            ctx->needs_input_grad(1) ? weight_grad(grad_y, x) : at::Tensor(),
            wants_bias_grad(ctx) ? bias_grad(grad_y) : at::Tensor(),
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
  const auto place = place_in(kGatherLinear, group_name);
  return at::empty_symint(all_gather_linear_shape(x, weight, bias, gather_dim, dim_size, place),
                          x.options());
}

at::Tensor linear_reduce_scatter_meta(const at::Tensor& x,
                                      const at::Tensor& weight,
                                      const OptionalTensor& bias,
                                      std::int64_t scatter_dim,
                                      std::string_view group_name) {
  const auto place = place_in(kLinearScatter, group_name);
  return at::empty_symint(linear_reduce_scatter_shape(x, weight, bias, scatter_dim, place),
                          x.options());
}

void register_sequence_linears(torch::Library& m) {
  m.impl("all_gather_linear", TORCH_FN(all_gather_linear));
  m.impl("linear_reduce_scatter", TORCH_FN(linear_reduce_scatter));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { register_sequence_linears(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_sequence_linears(m); }
TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("all_gather_linear", TORCH_FN(all_gather_linear_meta));
  m.impl("linear_reduce_scatter", TORCH_FN(linear_reduce_scatter_meta));
}
TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("all_gather_linear", TORCH_FN(all_gather_linear_autograd));
  m.impl("linear_reduce_scatter", TORCH_FN(linear_reduce_scatter_autograd));
}

}  // namespace weft::ops
