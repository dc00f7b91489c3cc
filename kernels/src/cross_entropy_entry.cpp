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

void check_rows(const char* name, const at::Tensor& rows, const at::Tensor& logits) {
  TORCH_CHECK(rows.device() == logits.device(),
              "cross_entropy got ",
              name,
              " on ",
              rows.device(),
              " but logits on ",
              logits.device(),
              "; move both to one device.");
  TORCH_CHECK(rows.dim() > 0 && rows.size(-1) == logits.size(0),
              "cross_entropy got ",
              name,
              " of shape ",
              rows.sizes(),
              " for logits of shape ",
              logits.sizes(),
              "; pass one for each row.");
}

void check_target(const at::Tensor& target, const at::Tensor& logits) {
  check_rows("target", target, logits);
  TORCH_CHECK(
      target.dim() == 1 && (target.scalar_type() == at::kLong || target.scalar_type() == at::kInt),
      "cross_entropy got target of ",
      target.scalar_type(),
      " ",
      target.sizes(),
      "; pass one dim of int64 or int32.");
}

}  // namespace

void check_statistics(const CrossEntropyStatisticsArguments& arguments, c10::DeviceType device) {
  check_logits(arguments.logits, device);
  check_target(arguments.target, arguments.logits);
}

void check_gradient(const CrossEntropyGradientArguments& arguments,
                    const at::Tensor& gradient,
                    c10::DeviceType device) {
  const at::Tensor& logits = arguments.logits;
  check_logits(logits, device);
  check_target(arguments.target, logits);
  check_rows("grad_losses", arguments.grad_losses, logits);
  check_rows("normalizers", arguments.normalizers, logits);
  TORCH_CHECK(arguments.grad_losses.dim() == 1 && arguments.normalizers.dim() == 2 &&
                  arguments.normalizers.size(0) == 2,
              "cross_entropy got grad_losses of shape ",
              arguments.grad_losses.sizes(),
              " and normalizers of shape ",
              arguments.normalizers.sizes(),
              "; pass [tokens] and [2, tokens].");
  TORCH_CHECK(gradient.device() == logits.device() &&
                  gradient.scalar_type() == logits.scalar_type() &&
                  gradient.sizes() == logits.sizes() && gradient.is_contiguous(),
              "cross_entropy got grad_logits of ",
              gradient.scalar_type(),
              " ",
              gradient.sizes(),
              " on ",
              gradient.device(),
              " for logits of ",
              logits.scalar_type(),
              " ",
              logits.sizes(),
              " on ",
              logits.device(),
              "; pass a contiguous tensor like them.");
}

at::Tensor empty_statistics(const at::Tensor& logits) {
  return at::empty({logits.size(0), 4},
                   logits.options().dtype(scalar_type_of(logits.scalar_type())));
}

at::Tensor with_contiguous_rows(const at::Tensor& logits) {
  return logits.size(1) <= 1 || logits.stride(1) == 1 ? logits : logits.contiguous();
}

at::Tensor as_targets(const at::Tensor& target) { return target.to(at::kLong).contiguous(); }

at::Tensor as_scalars(const at::Tensor& values, const at::Tensor& logits) {
  return values.to(scalar_type_of(logits.scalar_type())).contiguous();
}

}  // namespace weft::kernels::detail
