// The operators of device_kernels.h on the CPU.

#include "device_kernels.h"

namespace weft::ops {

namespace {

struct CpuKernels {
  static constexpr auto activation_forward = kernels::cpu::activation_forward;
  static constexpr auto activation_backward = kernels::cpu::activation_backward;
  static constexpr auto gated_forward = kernels::cpu::gated_forward;
  static constexpr auto gated_backward = kernels::cpu::gated_backward;
  static constexpr auto dropout = kernels::cpu::dropout;
  static constexpr auto norm_forward = kernels::cpu::norm_forward;
  static constexpr auto norm_backward = kernels::cpu::norm_backward;
  static constexpr auto cross_entropy_statistics = kernels::cpu::cross_entropy_statistics;
  static constexpr auto cross_entropy_gradient = kernels::cpu::cross_entropy_gradient;
};

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { DeviceKernels<CpuKernels>::register_kernels(m); }

}  // namespace weft::ops
