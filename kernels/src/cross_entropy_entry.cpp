#include "cross_entropy_entry.h"

#include <ATen/ops/empty.h>

namespace weft::kernels::detail {
namespace {

void check_logits(const at::Tensor& logits, c10::DeviceType device) {
  TORCH_CHECK(logits.device().type() == device,
              "cross_entropy got logits on ",
              logits.device(),
              " in the kernel for ",
              device,
              "; call the kernel of the tensor's own device.");
  TORCH_CHECK(is_supported(logits.scalar_type()),
              "cross_entropy got logits of dtype ",
              logits.scalar_type(),
              "; convert to float32, float64, bfloat16 or float16.");
  TORCH_CHECK(logits.dim() == 2,
              "cross_entropy got logits of shape ",
              logits.sizes(),
              "; pass a matrix, a row for each token.");
}

void check_per_row(const char* name, const at::Tensor& values, const at::Tensor& logits) {
  TORCH_CHECK(values.device() == logits.device(),
              "cross_entropy got ",
              name,
              " on ",
              values.device(),
              " but logits on ",
              logits.device(),
              "; move both to one device.");
  TORCH_CHECK(values.dim() > 0 && values.size(-1) == logits.size(0),
              "cross_entropy got ",
              name,
              " of shape ",
              values.sizes(),
              " for logits of shape ",
              logits.sizes(),
              "; pass a last dim with one entry per row of the logits.");
}

void check_target(const at::Tensor& target, const at::Tensor& logits) {
  check_per_row("target", target, logits);
  TORCH_CHECK(
      target.dim() == 1 && (target.scalar_type() == at::kLong || target.scalar_type() == at::kInt),
      "cross_entropy got target of ",
      target.scalar_type(),
      " ",
      target.sizes(),
      "; pass a tensor with one dim, of int64 or int32.");
}

}  // namespace

void check_statistics(const CrossEntropyStatisticsArguments& arguments, c10::DeviceType device) {
  check_logits(arguments.logits, device);
  check_target(arguments.target, arguments.logits);
}

void check_gradient(const CrossEntropyGradientArguments& arguments,
                    const at::Tensor& grad_logits,
                    c10::DeviceType device) {
  const at::Tensor& logits = arguments.logits;
  check_logits(logits, device);
  check_target(arguments.target, logits);
  check_per_row("grad_losses", arguments.grad_losses, logits);
  check_per_row("normalizers", arguments.normalizers, logits);
  TORCH_CHECK(arguments.grad_losses.dim() == 1 && arguments.normalizers.dim() == 2 &&
                  arguments.normalizers.size(0) == 2,
              "cross_entropy got grad_losses of shape ",
              arguments.grad_losses.sizes(),
              " and normalizers of shape ",
              arguments.normalizers.sizes(),
              "; pass [tokens] and [2, tokens].");
  TORCH_CHECK(grad_logits.device() == logits.device() &&
                  grad_logits.scalar_type() == logits.scalar_type() &&
                  grad_logits.sizes() == logits.sizes() && grad_logits.is_contiguous(),
              "cross_entropy got grad_logits of ",
              grad_logits.scalar_type(),
              " ",
              grad_logits.sizes(),
              " on ",
              grad_logits.device(),
              " for logits of ",
              logits.scalar_type(),
              " ",
              logits.sizes(),
              " on ",
              logits.device(),
              "; pass a contiguous tensor of the dtype, shape and device of the logits.");
}

at::Tensor empty_statistics(const at::Tensor& logits) {
  return at::empty({logits.size(0), 4},
                   logits.options().dtype(compute_type_of(logits.scalar_type())));
}

at::Tensor with_contiguous_rows(const at::Tensor& logits) {
  return logits.size(1) <= 1 || logits.stride(1) == 1 ? logits : logits.contiguous();
}

at::Tensor as_targets(const at::Tensor& target) { return target.to(at::kLong).contiguous(); }

at::Tensor in_compute_type(const at::Tensor& values, const at::Tensor& logits) {
  return values.to(compute_type_of(logits.scalar_type())).contiguous();
}

}  // namespace weft::kernels::detail
