#include "activation_entry.h"

namespace weft::kernels::detail {
namespace {

struct NamedOperand {
  const char* name;
  const at::Tensor* tensor;
};

void check_device_and_dtype(const char* function,
                            const NamedOperand& operand,
                            const NamedOperand& reference) {
  TORCH_CHECK(operand.tensor->defined(),
              function,
              " got an undefined tensor as ",
              operand.name,
              "; pass a tensor.");
  TORCH_CHECK(operand.tensor->device() == reference.tensor->device(),
              function,
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
              function,
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
  check_device_and_dtype(operands.function, operand, reference);
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

// Checks the device and the dtype of the operand that the others are compared with.
void check_reference(const char* function, const NamedOperand& x, c10::DeviceType device) {
  check_device_and_dtype(function, x, x);  // with itself: checks that it is defined
  TORCH_CHECK(x.tensor->device().type() == device,
              function,
              " got ",
              x.name,
              " on ",
              x.tensor->device(),
              " in the kernel for ",
              device,
              "; call the kernel of the tensor's own device.");
  const at::ScalarType type = x.tensor->scalar_type();
  TORCH_CHECK(is_supported(type),
              function,
              " got ",
              x.name,
              " of dtype ",
              type,
              "; convert to float32, float64, bfloat16 or float16.");
}

}  // namespace

void check_operands(const ActivationOperands& operands, c10::DeviceType device) {
  const NamedOperand x = {operands.up != nullptr ? "gate" : "x", &operands.x};
  check_reference(operands.function, x, device);
  check_same_shape(operands, {"up", operands.up}, x);
  check_same_shape(operands, {"grad_h", operands.grad_h}, x);
}

at::DimVector check_gate_up(const char* function,
                            const at::Tensor& gate_up,
                            const at::Tensor* grad_h,
                            c10::DeviceType device) {
  const NamedOperand reference = {"gate_up", &gate_up};
  check_reference(function, reference, device);
  TORCH_CHECK(gate_up.dim() > 0 && gate_up.size(-1) % 2 == 0,
              function,
              " got gate_up of shape ",
              gate_up.sizes(),
              "; pass a tensor whose last dim has gate in its first half and up in its second.");
  at::DimVector h_sizes(gate_up.sizes());
  h_sizes.back() /= 2;
  if (grad_h != nullptr) {
    check_device_and_dtype(function, {"grad_h", grad_h}, reference);
    TORCH_CHECK(grad_h->sizes() == h_sizes,
                function,
                " got grad_h of shape ",
                grad_h->sizes(),
                " but gate_up of shape ",
                gate_up.sizes(),
                "; pass a grad_h with half as many columns.");
  }
  return h_sizes;
}

}  // namespace weft::kernels::detail
