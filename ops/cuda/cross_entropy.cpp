// The local half of the cross-entropies on CUDA as registered operators; kernels/cuda computes it.

#include "cross_entropy_kernels.h"

#include <weft/kernels/cross_entropy.h>

#include <torch/library.h>

namespace weft::ops {

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  CrossEntropyKernels<kernels::cuda::cross_entropy_statistics,
                      kernels::cuda::cross_entropy_gradient>::register_kernels(m);
}

}  // namespace weft::ops
