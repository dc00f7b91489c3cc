// The operators of device_kernels.h on CUDA.

#include "device_kernels.h"

namespace weft::ops {

namespace {

struct CudaKernels {
  static constexpr auto activation_forward = kernels::cuda::activation_forward;
  static constexpr auto activation_backward = kernels::cuda::activation_backward;
  static constexpr auto gated_forward = kernels::cuda::gated_forward;
  static constexpr auto gated_backward = kernels::cuda::gated_backward;
  static constexpr auto gate_up_forward = kernels::cuda::gate_up_forward;
  static constexpr auto gate_up_backward = kernels::cuda::gate_up_backward;
  static constexpr auto dropout = kernels::cuda::dropout;
  static constexpr auto norm_forward = kernels::cuda::norm_forward;
  static constexpr auto norm_backward = kernels::cuda::norm_backward;
  static constexpr auto cross_entropy_statistics = kernels::cuda::cross_entropy_statistics;
  static constexpr auto cross_entropy_gradient = kernels::cuda::cross_entropy_gradient;
  static constexpr auto adam_step = kernels::cuda::adam_step;
  static constexpr auto momentum_step = kernels::cuda::momentum_step;
  static constexpr auto split_float = kernels::cuda::split_float;
  static constexpr auto join_float = kernels::cuda::join_float;
  static constexpr auto quantize_blocks = kernels::cuda::quantize_blocks;
  static constexpr auto dequantize_blocks = kernels::cuda::dequantize_blocks;
};

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) { KernelAdapters<CudaKernels>::register_kernels(m); }

}  // namespace weft::ops
