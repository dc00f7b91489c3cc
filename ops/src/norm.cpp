// rms_norm and layer_norm, with and without the addition of a residual: the registered operators
// and their gradients; kernels/ has the arithmetic. The tokens are sharded over the group, and each
// rank normalizes its own. Weight and bias are replicated; one all-reduce sums the gradients of
// both.

#include "autograd_support.h"
#include "dispatch.h"
#include "group_collectives.h"
#include "shape.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <string>
#include <tuple>

namespace weft::ops {

namespace {

constexpr std::string_view kRmsNorm = "weft::rms_norm";
constexpr std::string_view kLayerNorm = "weft::layer_norm";
constexpr std::string_view kAddRmsNorm = "weft::add_rms_norm";
constexpr std::string_view kAddLayerNorm = "weft::add_layer_norm";

using YAndSum = std::tuple<at::Tensor, at::Tensor>;

// Checks `param`, a weight or bias. Autocast does not cast these: they may be float32 while x has a
// half type.
void check_norm_param(std::string_view op,
                      const at::Tensor& x,
                      const at::Tensor& param,
                      std::string_view name) {
  const bool is_half = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  TORCH_CHECK_TYPE(
      param.scalar_type() == x.scalar_type() || (is_half && param.scalar_type() == at::kFloat),
      op,
      ": got ",
      name,
      " of dtype ",
      param.scalar_type(),
      " with x of dtype ",
      x.scalar_type(),
      "; pass it in the dtype of x, or in float32 if x is bfloat16 or float16.");
  TORCH_CHECK_VALUE(param.device() == x.device(),
                    op,
                    ": got ",
                    name,
                    " on ",
                    param.device(),
                    " with x on ",
                    x.device(),
                    "; move them to one device.");
  TORCH_CHECK_VALUE(param.dim() == 1 && param.sym_size(0) == x.sym_size(-1),
                    op,
                    ": got ",
                    name,
                    " of shape ",
                    param.sym_sizes(),
                    ", which must be [",
                    x.sym_size(-1),
                    "], the last dim of x; norms are over that dim only.");
}

// Checks that residual has x's shape and dtype, and that weight and bias are [d], both of x's dtype
// or, if x is bfloat16 or float16, both float32.
void check_norm(std::string_view op,
                const at::Tensor& x,
                const OptionalTensor& residual,
                const OptionalTensor& weight,
                const OptionalTensor& bias,
                double eps) {
  check_input(op, x);
  TORCH_CHECK_VALUE(eps >= 0 && std::isfinite(eps),
                    op,
                    ": got eps ",
                    eps,
                    "; pass a finite number that is not negative, such as 1e-6.");
  if (residual.has_value()) {
    check_like_x(op, x, *residual, "residual");
    TORCH_CHECK_VALUE(residual->sym_sizes() == x.sym_sizes(),
                      op,
                      ": got residual of shape ",
                      residual->sym_sizes(),
                      " with x of shape ",
                      x.sym_sizes(),
                      "; pass a residual of the shape of x.");
  }
  if (weight.has_value()) {
    check_norm_param(op, x, *weight, "weight");
  }
  if (bias.has_value()) {
    TORCH_CHECK_VALUE(
        weight.has_value(), op, ": got a bias without a weight; pass a weight of ones, too.");
    check_norm_param(op, x, *bias, "bias");
    TORCH_CHECK_TYPE(bias->scalar_type() == weight->scalar_type(),
                     op,
                     ": got bias of dtype ",
                     bias->scalar_type(),
                     " with weight of dtype ",
                     weight->scalar_type(),
                     "; convert one of them.");
  }
}

// A call of any of the four operators.
struct NormCall {
  std::string_view op;
  bool centered;
  std::string group_name;
  double eps;
};

NormCall rms_call(std::string_view op, std::string_view group_name, double eps) {
  return {op, false, std::string(group_name), eps};
}
NormCall layer_call(std::string_view op, std::string_view group_name, double eps) {
  return {op, true, std::string(group_name), eps};
}

void check(const NormCall& call,
           const at::Tensor& x,
           const OptionalTensor& residual,
           const OptionalTensor& weight,
           const OptionalTensor& bias) {
  check_norm(call.op, x, residual, weight, bias, call.eps);
  resolve_group(call.op, call.group_name);
}

YAndSum forward(const NormCall& call,
                const at::Tensor& x,
                const OptionalTensor& residual,
                const OptionalTensor& weight,
                const OptionalTensor& bias) {
  check(call, x, residual, weight, bias);
  const auto [y, sum, mean, rstd] =
      dispatch::norm(x, residual, weight, bias, call.centered, call.eps);
  return {y, sum};
}

YAndSum meta(const NormCall& call,
             const at::Tensor& x,
             const OptionalTensor& residual,
             const OptionalTensor& weight,
             const OptionalTensor& bias) {
  check(call, x, residual, weight, bias);
  const auto empty = [&x] { return at::empty_symint(x.sym_sizes(), x.options()); };
  return {empty(), residual.has_value() ? empty() : at::empty({0}, x.options())};
}

// Inputs: x, residual, weight, bias. The last three are optional, and needs_input_grad does not
// count absent inputs. Outputs: y and, with a residual, the sum x + residual.
class NormFunction : public torch::autograd::Function<NormFunction> {
 public:
  static variable_list forward(AutogradContext* ctx,
                               const at::Tensor& x,
                               const OptionalTensor& residual,
                               const OptionalTensor& weight,
                               const OptionalTensor& bias,
                               const NormCall& call) {
    const at::AutoDispatchBelowADInplaceOrView below;
    check(call, x, residual, weight, bias);
    const auto [y, sum, mean, rstd] =
        dispatch::norm(x, residual, weight, bias, call.centered, call.eps);
    ctx->save_for_backward(
        {residual.has_value() ? sum : x, weight.value_or(at::Tensor()), mean, rstd});
    ctx->set_materialize_grads(false);
    ctx->saved_data["op"] = std::string(call.op);
    ctx->saved_data["centered"] = call.centered;
    ctx->saved_data["group_name"] = call.group_name;
    ctx->saved_data["has_residual"] = residual.has_value();
    ctx->saved_data["has_bias"] = bias.has_value();
    return residual.has_value() ? variable_list{y, sum} : variable_list{y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(ctx->saved_data.at("op").toStringRef());
    const auto saved = ctx->get_saved_variables();
    const auto &norm_input = saved[0], &weight = saved[1], &mean = saved[2], &rstd = saved[3];
    const bool has_residual = ctx->saved_data.at("has_residual").toBool();
    const bool has_bias = ctx->saved_data.at("has_bias").toBool();
    const std::size_t weight_idx = has_residual ? 2 : 1;
    const bool wants_x = ctx->needs_input_grad(0);
    const bool wants_residual = has_residual && ctx->needs_input_grad(1);
    const bool wants_weight = weight.defined() && ctx->needs_input_grad(weight_idx);
    const bool wants_bias = has_bias && ctx->needs_input_grad(weight_idx + 1);
    const std::int64_t num_params = !wants_weight && !wants_bias ? 0 : wants_bias ? 2 : 1;

    const bool has_grad_sum = has_residual && grads[1].defined();
    at::Tensor grad_input, grad_params;
    if (grads[0].defined()) {
      std::tie(grad_input, grad_params) =
          dispatch::norm_backward(grads[0],
                                  has_grad_sum ? OptionalTensor(grads[1]) : std::nullopt,
                                  norm_input,
                                  weight.defined() ? OptionalTensor(weight) : std::nullopt,
                                  mean,
                                  rstd,
                                  ctx->saved_data.at("centered").toBool(),
                                  wants_x || wants_residual,
                                  num_params);
    } else {  // only the sum was used, or no output
      grad_input = has_grad_sum ? grads[1] : at::Tensor();
      if (num_params > 0) {
        grad_params = at::zeros_symint({num_params, weight.sym_size(0)}, weight.options());
      }
    }
    if (num_params > 0) {
      grad_params =
          dispatch::reduce_from_group(grad_params, ctx->saved_data.at("group_name").toStringRef());
    }
    variable_list result(5);
    if (wants_x) {
      result[0] = grad_input;
    }
    if (wants_residual) {
      result[1] = grad_input;
    }
    if (wants_weight) {
      result[2] = grad_params.select(0, 0);
    }
    if (wants_bias) {
      result[3] = grad_params.select(0, 1);
    }
    return result;
  }
};

YAndSum autograd(const NormCall& call,
                 const at::Tensor& x,
                 const OptionalTensor& residual,
                 const OptionalTensor& weight,
                 const OptionalTensor& bias) {
  auto outputs = NormFunction::apply(x, residual, weight, bias, call);
  return {outputs[0], residual.has_value() ? outputs[1] : at::Tensor()};
}

using Implementation = YAndSum (*)(const NormCall&,
                                   const at::Tensor&,
                                   const OptionalTensor&,
                                   const OptionalTensor&,
                                   const OptionalTensor&);

// The four operators on top of one implementation.
template <Implementation kRun>
struct Norms {
  static at::Tensor rms_norm(const at::Tensor& x,
                             const OptionalTensor& weight,
                             std::string_view group_name,
                             double eps) {
    return std::get<0>(kRun(rms_call(kRmsNorm, group_name, eps), x, {}, weight, {}));
  }

  static at::Tensor layer_norm(const at::Tensor& x,
                               const OptionalTensor& weight,
                               const OptionalTensor& bias,
                               std::string_view group_name,
                               double eps) {
    return std::get<0>(kRun(layer_call(kLayerNorm, group_name, eps), x, {}, weight, bias));
  }

  static YAndSum add_rms_norm(const at::Tensor& x,
                              const at::Tensor& residual,
                              const OptionalTensor& weight,
                              std::string_view group_name,
                              double eps) {
    return kRun(rms_call(kAddRmsNorm, group_name, eps), x, residual, weight, {});
  }

  static YAndSum add_layer_norm(const at::Tensor& x,
                                const at::Tensor& residual,
                                const OptionalTensor& weight,
                                const OptionalTensor& bias,
                                std::string_view group_name,
                                double eps) {
    return kRun(layer_call(kAddLayerNorm, group_name, eps), x, residual, weight, bias);
  }

  static void register_kernels(torch::Library& m) {
    m.impl("rms_norm", TORCH_FN(rms_norm));
    m.impl("layer_norm", TORCH_FN(layer_norm));
    m.impl("add_rms_norm", TORCH_FN(add_rms_norm));
    m.impl("add_layer_norm", TORCH_FN(add_layer_norm));
  }
};

c10::SymDimVector stats_shape(const at::Tensor& x) {
  return {x.sym_sizes().begin(), x.sym_sizes().end() - 1};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm_meta(
    const at::Tensor& x,
    const OptionalTensor& residual,
    const OptionalTensor& /*weight*/,
    const OptionalTensor& /*bias*/,
    bool centered,
    double /*eps*/) {
  const auto options = x.options();
  const auto stats_options =
      options.dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  return {
      at::empty_symint(x.sym_sizes(), options),
      residual.has_value() ? at::empty_symint(x.sym_sizes(), options) : at::empty({0}, options),
      centered ? at::empty_symint(stats_shape(x), stats_options) : at::empty({0}, stats_options),
      at::empty_symint(stats_shape(x), stats_options)};
}

std::tuple<at::Tensor, at::Tensor> norm_backward_meta(const at::Tensor& /*grad_y*/,
                                                      const OptionalTensor& /*grad_sum*/,
                                                      const at::Tensor& norm_input,
                                                      const OptionalTensor& weight,
                                                      const at::Tensor& /*mean*/,
                                                      const at::Tensor& /*rstd*/,
                                                      bool /*centered*/,
                                                      bool wants_input,
                                                      std::int64_t num_params) {
  const auto params_options = norm_input.options().dtype(
      weight.has_value() ? weight->scalar_type() : norm_input.scalar_type());
  return {wants_input ? at::empty_symint(norm_input.sym_sizes(), norm_input.options())
                      : at::empty({0}, norm_input.options()),
          num_params > 0
              ? at::empty_symint({c10::SymInt(num_params), norm_input.sym_size(-1)}, params_options)
              : at::empty({0}, params_options)};
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { Norms<forward>::register_kernels(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { Norms<forward>::register_kernels(m); }
TORCH_LIBRARY_IMPL(weft, Meta, m) {
  Norms<meta>::register_kernels(m);
  m.impl("_norm", TORCH_FN(norm_meta));
  m.impl("_norm_backward", TORCH_FN(norm_backward_meta));
}
TORCH_LIBRARY_IMPL(weft, Autograd, m) { Norms<autograd>::register_kernels(m); }

}  // namespace weft::ops
