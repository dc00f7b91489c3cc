// column_linear and row_linear, the column-parallel and the row-parallel linear layer: kernels and
// gradients.

#include "autograd_support.h"
#include "dispatch.h"
#include "group.h"
#include "reduced_products.h"
#include "shape.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <torch/library.h>

#include <string>
#include <tuple>

namespace weft::ops {

namespace {

constexpr std::string_view kColumn = "weft::column_linear";
constexpr std::string_view kRow = "weft::row_linear";

at::Tensor column_linear(const at::Tensor& x,
                         const at::Tensor& weight,
                         const OptionalTensor& bias,
                         std::string_view group_name) {
  linear_shape(kColumn, x, weight, bias);
  resolve_group(kColumn, std::string(group_name));  // raises here rather than in the backward
  return at::linear(x, weight, bias);
}

at::Tensor row_linear(const at::Tensor& x,
                      const at::Tensor& weight,
                      const OptionalTensor& bias,
                      std::string_view group_name) {
  linear_shape(kRow, x, weight, bias);
  const auto group = resolve_group(kRow, std::string(group_name));
  if (!group) {
    return at::linear(x, weight, bias);
  }
  auto y = reduced_linear(kRow, x, weight, group);
  return bias.has_value() ? y.add_(*bias) : y;
}

// The bias, if present, is input 2; autograd::Function does not count absent optional inputs.
bool needs_bias_grad(AutogradContext* ctx) {
  return ctx->saved_data.at("has_bias").toBool() && ctx->needs_input_grad(2);
}

class ColumnLinear : public torch::autograd::Function<ColumnLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            const at::Tensor& weight,
                            const OptionalTensor& bias,
                            const std::string& group_name) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["group_name"] = group_name;
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::column_linear(x, weight, bias, group_name);
  }

  // The all-reduce of grad_x is in flight while grad_weight and grad_bias are computed, if they are
  // needed.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kColumn);
    const auto& grad_y = grads[0];
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1];
    const auto& group_name = ctx->saved_data.at("group_name").toStringRef();
    const bool has_other_grads = ctx->needs_input_grad(1) || needs_bias_grad(ctx);
    variable_list result(4);
    PendingCollective pending;
    if (ctx->needs_input_grad(0)) {
      if (is_traced(grad_y)) {
        result[0] = dispatch::reduce_from_group(at::matmul(grad_y, weight), group_name);
      } else {
        std::tie(result[0], pending) = start_reduced_input_product(
            kColumn, resolve_group(kColumn, group_name), has_other_grads, grad_y, weight);
      }
    }
    if (ctx->needs_input_grad(1)) {
      result[1] = weight_grad(grad_y, x);
    }
    if (needs_bias_grad(ctx)) {
      result[2] = bias_grad(grad_y);
    }
    pending.wait();
    return result;
  }
};

class RowLinear : public torch::autograd::Function<RowLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            const at::Tensor& weight,
                            const OptionalTensor& bias,
                            const std::string& group_name) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::row_linear(x, weight, bias, group_name);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kRow);
    const auto& grad_y = grads[0];
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1];
    return {ctx->needs_input_grad(0) ? at::matmul(grad_y, weight) : at::Tensor(),
            ctx->needs_input_grad(1) ? weight_grad(grad_y, x) : at::Tensor(),
            needs_bias_grad(ctx) ? bias_grad(grad_y) : at::Tensor(),
            at::Tensor()};
  }
};

at::Tensor column_linear_autograd(const at::Tensor& x,
                                  const at::Tensor& weight,
                                  const OptionalTensor& bias,
                                  std::string_view group_name) {
  return ColumnLinear::apply(x, weight, bias, std::string(group_name));
}

at::Tensor row_linear_autograd(const at::Tensor& x,
                               const at::Tensor& weight,
                               const OptionalTensor& bias,
                               std::string_view group_name) {
  return RowLinear::apply(x, weight, bias, std::string(group_name));
}

at::Tensor column_linear_meta(const at::Tensor& x,
                              const at::Tensor& weight,
                              const OptionalTensor& bias,
                              std::string_view /*group_name*/) {
  return at::empty_symint(linear_shape(kColumn, x, weight, bias), x.options());
}

at::Tensor row_linear_meta(const at::Tensor& x,
                           const at::Tensor& weight,
                           const OptionalTensor& bias,
                           std::string_view /*group_name*/) {
  return at::empty_symint(linear_shape(kRow, x, weight, bias), x.options());
}

void register_kernels(torch::Library& m) {
  m.impl("column_linear", TORCH_FN(column_linear));
  m.impl("row_linear", TORCH_FN(row_linear));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("column_linear", TORCH_FN(column_linear_meta));
  m.impl("row_linear", TORCH_FN(row_linear_meta));
}
TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("column_linear", TORCH_FN(column_linear_autograd));
  m.impl("row_linear", TORCH_FN(row_linear_autograd));
}

}  // namespace weft::ops
