#include "activation_entry.h"

namespace weft::kernels::detail {
namespace {

struct NamedOperand {
  const char* name;
  const at::Tensor* tensor;
};

void check_device_and_dtype(const ActivationOperands& operands,
                            const NamedOperand& operand,
                            const NamedOperand& reference) {
  TORCH_CHECK(operand.tensor->defined(),
              operands.function,
              " got an undefined tensor as ",
              operand.name,
              "; pass a tensor.");
  TORCH_CHECK(operand.tensor->device() == reference.tensor->device(),
              operands.function,
              " got ",
              operand.name,
              " on ",
              operand.tensor->device(),
              " but ",
              reference.name,
              " on ",
              reference.tensor->device(),
              "; move both to one device.");
  TORCH_CHECK(operand.tensor->scalar_type() == reference.tensor->scalar_type(),
              operands.function,
              " got ",
              operand.name,
              " of dtype ",
              operand.tensor->scalar_type(),
              " but ",
              reference.name,
              " of dtype ",
              reference.tensor->scalar_type(),
              "; convert both to one dtype.");
}

void check_same_shape(const ActivationOperands& operands,
                      const NamedOperand& operand,
                      const NamedOperand& reference) {
  if (operand.tensor == nullptr) return;
  check_device_and_dtype(operands, operand, reference);
  TORCH_CHECK(operand.tensor->sizes() == reference.tensor->sizes(),
              operands.function,
              " got ",
              operand.name,
              " of shape ",
              operand.tensor->sizes(),
              " but ",
              reference.name,
              " of shape ",
              reference.tensor->sizes(),
              "; pass tensors of one shape.");
}

}  // namespace

void check_operands(const ActivationOperands& operands, c10::DeviceType device) {
  const NamedOperand x = {operands.up != nullptr ? "gate" : "x", &operands.x};
  check_device_and_dtype(operands, x, x);  // with itself: checks that it is defined
  TORCH_CHECK(x.tensor->device().type() == device,
              operands.function,
              " got ",
              x.name,
              " on ",
              x.tensor->device(),
              " in the kernel for ",
              device,
              "; call the kernel of the tensor's own device.");
  const at::ScalarType type = x.tensor->scalar_type();
  TORCH_CHECK(is_supported(type),
              operands.function,
              " got ",
              x.name,
              " of dtype ",
              type,
              "; convert to float32, float64, bfloat16 or float16.");
  check_same_shape(operands, {"up", operands.up}, x);
  check_same_shape(operands, {"grad_h", operands.grad_h}, x);
}

}  // namespace weft::kernels::detail
