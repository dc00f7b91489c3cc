#include "norm_entry.h"

#include <ATen/ops/empty.h>

namespace weft::kernels::detail {
namespace {

void check_like(const char* name, const at::Tensor& tensor, const at::Tensor& x) {
  TORCH_CHECK(tensor.device() == x.device(),
              "norm got ",
              name,
              " on ",
              tensor.device(),
              " but x on ",
              x.device(),
              "; move both to one device.");
  TORCH_CHECK(tensor.scalar_type() == x.scalar_type() && tensor.sizes() == x.sizes(),
              "norm got ",
              name,
              " of ",
              tensor.scalar_type(),
              " ",
              tensor.sizes(),
              " but x of ",
              x.scalar_type(),
              " ",
              x.sizes(),
              "; pass tensors of one shape and dtype.");
}

void check_params(const char* name, const at::Tensor& params, const at::Tensor& x) {
  TORCH_CHECK(params.device() == x.device(),
              "norm got ",
              name,
              " on ",
              params.device(),
              " but x on ",
              x.device(),
              "; move both to one device.");
  const auto type = params.scalar_type();
  TORCH_CHECK(type == x.scalar_type() || type == scalar_type_of(x.scalar_type()),
              "norm got ",
              name,
              " of dtype ",
              type,
              " with x of dtype ",
              x.scalar_type(),
              "; pass the dtype of x, or float32 beside half types.");
  TORCH_CHECK(params.dim() == 1 && params.size(0) == x.size(-1),
              "norm got ",
              name,
              " of shape ",
              params.sizes(),
              " for x of shape ",
              x.sizes(),
              "; pass one dim, as long as the last dim of x.");
}

void check_x(const at::Tensor& x, c10::DeviceType device) {
  TORCH_CHECK(x.device().type() == device,
              "norm got x on ",
              x.device(),
              " in the kernel for ",
              device,
              "; call the kernel of the tensor's own device.");
  TORCH_CHECK(is_supported(x.scalar_type()),
              "norm got x of dtype ",
              x.scalar_type(),
              "; convert to float32, float64, bfloat16 or float16.");
  TORCH_CHECK(x.dim() > 0, "norm got x without dims; pass at least one dim, the features.");
}

void check_rows(const char* name, const at::Tensor& rows, const at::Tensor& norm_input) {
  TORCH_CHECK(rows.device() == norm_input.device() &&
                  rows.scalar_type() == scalar_type_of(norm_input.scalar_type()) &&
                  rows.sizes() == norm_input.sizes().slice(0, norm_input.dim() - 1),
              "norm got ",
              name,
              " of ",
              rows.scalar_type(),
              " ",
              rows.sizes(),
              " on ",
              rows.device(),
              " for norm_input of shape ",
              norm_input.sizes(),
              " on ",
              norm_input.device(),
              "; pass the forward's result.");
}

}  // namespace

void check_norm(const NormArguments& arguments, c10::DeviceType device) {
  check_x(arguments.x, device);
  if (arguments.residual) check_like("residual", *arguments.residual, arguments.x);
  if (arguments.weight) check_params("weight", *arguments.weight, arguments.x);
  if (arguments.bias) {
    check_params("bias", *arguments.bias, arguments.x);
    TORCH_CHECK(
        arguments.weight && arguments.weight->scalar_type() == arguments.bias->scalar_type(),
        "norm got a bias without a weight of its dtype; pass both, of one dtype.");
  }
}

void check_norm_backward(const at::Tensor& grad_y,
                         const std::optional<at::Tensor>& grad_sum,
                         const NormSaved& saved,
                         c10::DeviceType device) {
  check_x(saved.norm_input, device);
  check_like("grad_y", grad_y, saved.norm_input);
  if (grad_sum) check_like("grad_sum", *grad_sum, saved.norm_input);
  if (saved.weight) check_params("weight", *saved.weight, saved.norm_input);
  if (saved.mean) check_rows("mean", *saved.mean, saved.norm_input);
  check_rows("rstd", saved.rstd, saved.norm_input);
}

at::Tensor empty_norm_values(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }

at::Tensor empty_norm_rows(const at::Tensor& x) {
  return at::empty(x.sizes().slice(0, x.dim() - 1),
                   x.options().dtype(scalar_type_of(x.scalar_type())));
}

}  // namespace weft::kernels::detail
