// The operators of device_kernels.h on the CPU, and the Meta kernels of the activations.

#include "device_kernels.h"

#include <ATen/ops/empty.h>

namespace weft::ops {

namespace {

struct CpuKernels {
  static constexpr auto activation_forward = kernels::cpu::activation_forward;
  static constexpr auto activation_backward = kernels::cpu::activation_backward;
  static constexpr auto gated_forward = kernels::cpu::gated_forward;
  static constexpr auto gated_backward = kernels::cpu::gated_backward;
  static constexpr auto gate_up_forward = kernels::cpu::gate_up_forward;
  static constexpr auto gate_up_backward = kernels::cpu::gate_up_backward;
  static constexpr auto dropout = kernels::cpu::dropout;
  static constexpr auto norm_forward = kernels::cpu::norm_forward;
  static constexpr auto norm_backward = kernels::cpu::norm_backward;
  static constexpr auto cross_entropy_statistics = kernels::cpu::cross_entropy_statistics;
  static constexpr auto cross_entropy_gradient = kernels::cpu::cross_entropy_gradient;
  static constexpr auto adam_step = kernels::cpu::adam_step;
  static constexpr auto momentum_step = kernels::cpu::momentum_step;
  static constexpr auto split_float = kernels::cpu::split_float;
  static constexpr auto join_float = kernels::cpu::join_float;
  static constexpr auto quantize_blocks = kernels::cpu::quantize_blocks;
  static constexpr auto dequantize_blocks = kernels::cpu::dequantize_blocks;
};

at::Tensor activation_meta(const at::Tensor& x, std::string_view name) {
  checked_activation("weft::_activation", name);
  return at::empty_symint(x.sym_sizes(), x.options());
}

std::tuple<at::Tensor, at::Tensor> activation_backward_meta(const at::Tensor& /*grad*/,
                                                            const at::Tensor& x,
                                                            std::string_view name) {
  checked_activation("weft::_activation_backward", name);
  return {at::empty_symint(x.sym_sizes(), x.options()),
          at::empty_symint(x.sym_sizes(), x.options())};
}

at::Tensor gated_activation_meta(const at::Tensor& gate,
                                 const at::Tensor& /*up*/,
                                 std::string_view name) {
  checked_activation("weft::_gated_activation", name);
  return at::empty_symint(gate.sym_sizes(), gate.options());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> gated_activation_backward_meta(
    const at::Tensor& /*grad*/,
    const at::Tensor& gate,
    const at::Tensor& /*up*/,
    std::string_view name) {
  checked_activation("weft::_gated_activation_backward", name);
  return {at::empty_symint(gate.sym_sizes(), gate.options()),
          at::empty_symint(gate.sym_sizes(), gate.options()),
          at::empty_symint(gate.sym_sizes(), gate.options())};
}

at::Tensor gate_up_activation_meta(const at::Tensor& gate_up, std::string_view name) {
  checked_activation("weft::_gate_up_activation", name);
  c10::SymDimVector sizes(gate_up.sym_sizes());
  sizes.back() = sizes.back() / 2;
  return at::empty_symint(sizes, gate_up.options());
}

std::tuple<at::Tensor, at::Tensor> gate_up_activation_backward_meta(const at::Tensor& grad,
                                                                    const at::Tensor& gate_up,
                                                                    std::string_view name) {
  checked_activation("weft::_gate_up_activation_backward", name);
  return {at::empty_symint(gate_up.sym_sizes(), gate_up.options()),
          at::empty_symint(grad.sym_sizes(), gate_up.options())};
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { KernelAdapters<CpuKernels>::register_kernels(m); }
TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("_activation", TORCH_FN(activation_meta));
  m.impl("_activation_backward", TORCH_FN(activation_backward_meta));
  m.impl("_gated_activation", TORCH_FN(gated_activation_meta));
  m.impl("_gated_activation_backward", TORCH_FN(gated_activation_backward_meta));
  m.impl("_gate_up_activation", TORCH_FN(gate_up_activation_meta));
  m.impl("_gate_up_activation_backward", TORCH_FN(gate_up_activation_backward_meta));
}

}  // namespace weft::ops
