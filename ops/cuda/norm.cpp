// The norms on CUDA as registered operators; kernels/cuda computes them.

#include "norm_kernels.h"

#include <weft/kernels/norm.h>

#include <torch/library.h>

namespace weft::ops {

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  using Kernels = NormKernels<kernels::cuda::norm_forward, kernels::cuda::norm_backward>;
  m.impl("_norm", TORCH_FN(Kernels::forward));
  m.impl("_norm_backward", TORCH_FN(Kernels::backward));
}

}  // namespace weft::ops
