#include "norm_entry.h"

#include <ATen/ops/empty.h>

namespace weft::kernels::detail {
namespace {

// An operand and its name in errors.
struct NormOperand {
  const char* name;
  const at::Tensor& tensor;
};

void check_device(const NormOperand& operand, const NormOperand& reference) {
  TORCH_CHECK(operand.tensor.device() == reference.tensor.device(),
              "norm got ",
              operand.name,
              " on ",
              operand.tensor.device(),
              " but ",
              reference.name,
              " on ",
              reference.tensor.device(),
              "; move both to one device.");
}

void check_like_input(const NormOperand& operand, const NormOperand& input) {
  check_device(operand, input);
  TORCH_CHECK(operand.tensor.scalar_type() == input.tensor.scalar_type() &&
                  operand.tensor.sizes() == input.tensor.sizes(),
              "norm got ",
              operand.name,
              " of ",
              operand.tensor.scalar_type(),
              " ",
              operand.tensor.sizes(),
              " but ",
              input.name,
              " of ",
              input.tensor.scalar_type(),
              " ",
              input.tensor.sizes(),
              "; pass tensors of one shape and dtype.");
}

void check_params(const NormOperand& params, const NormOperand& input) {
  check_device(params, input);
  const auto type = params.tensor.scalar_type();
  TORCH_CHECK(
      type == input.tensor.scalar_type() || type == compute_type_of(input.tensor.scalar_type()),
      "norm got ",
      params.name,
      " of dtype ",
      type,
      " with ",
      input.name,
      " of dtype ",
      input.tensor.scalar_type(),
      "; pass the dtype of ",
      input.name,
      ", or float32 if ",
      input.name,
      " is bfloat16 or float16.");
  TORCH_CHECK(params.tensor.dim() == 1 && params.tensor.size(0) == input.tensor.size(-1),
              "norm got ",
              params.name,
              " of shape ",
              params.tensor.sizes(),
              " for ",
              input.name,
              " of shape ",
              input.tensor.sizes(),
              "; pass one dim, as long as the last dim of ",
              input.name,
              ".");
}

void check_input(const NormOperand& input, c10::DeviceType device) {
  TORCH_CHECK(input.tensor.device().type() == device,
              "norm got ",
              input.name,
              " on ",
              input.tensor.device(),
              " in the kernel for ",
              device,
              "; call the kernel of the tensor's own device.");
  TORCH_CHECK(is_supported(input.tensor.scalar_type()),
              "norm got ",
              input.name,
              " of dtype ",
              input.tensor.scalar_type(),
              "; convert to float32, float64, bfloat16 or float16.");
  TORCH_CHECK(input.tensor.dim() > 0,
              "norm got ",
              input.name,
              " without dims; pass at least one dim, the features.");
}

void check_row_stats(const NormOperand& stats, const NormOperand& input) {
  const auto type = compute_type_of(input.tensor.scalar_type());
  const auto sizes = input.tensor.sizes().slice(0, input.tensor.dim() - 1);
  TORCH_CHECK(stats.tensor.device() == input.tensor.device() &&
                  stats.tensor.scalar_type() == type && stats.tensor.sizes() == sizes,
              "norm got ",
              stats.name,
              " of ",
              stats.tensor.scalar_type(),
              " ",
              stats.tensor.sizes(),
              " on ",
              stats.tensor.device(),
              ", which must be ",
              type,
              " ",
              sizes,
              " on ",
              input.tensor.device(),
              "; pass it as the forward returned it.");
}

}  // namespace

void check_norm(const NormArguments& arguments, c10::DeviceType device) {
  const NormOperand x = {"x", arguments.x};
  check_input(x, device);
  if (arguments.residual) check_like_input({"residual", *arguments.residual}, x);
  if (arguments.weight) check_params({"weight", *arguments.weight}, x);
  if (arguments.bias) {
    check_params({"bias", *arguments.bias}, x);
    TORCH_CHECK(
        arguments.weight && arguments.weight->scalar_type() == arguments.bias->scalar_type(),
        "norm got a bias without a weight of its dtype; pass both, of one dtype.");
  }
}

void check_norm_backward(const at::Tensor& grad_y,
                         const std::optional<at::Tensor>& grad_sum,
                         const NormSaved& saved,
                         c10::DeviceType device) {
  const NormOperand norm_input = {"norm_input", saved.norm_input};
  check_input(norm_input, device);
  check_like_input({"grad_y", grad_y}, norm_input);
  if (grad_sum) check_like_input({"grad_sum", *grad_sum}, norm_input);
  if (saved.weight) check_params({"weight", *saved.weight}, norm_input);
  if (saved.mean) check_row_stats({"mean", *saved.mean}, norm_input);
  check_row_stats({"rstd", saved.rstd}, norm_input);
}

at::Tensor empty_like_input(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }

at::Tensor empty_row_stats(const at::Tensor& x) {
  return at::empty(x.sizes().slice(0, x.dim() - 1),
                   x.options().dtype(compute_type_of(x.scalar_type())));
}

}  // namespace weft::kernels::detail
