// The dropout on CUDA as a registered operator; kernels/cuda computes it.

#include <weft/kernels/dropout.h>

#include <torch/library.h>

#include <cstdint>

namespace weft::ops {

namespace {

at::Tensor dropout_of_part(const at::Tensor& x,
                           std::int64_t seed,
                           double p,
                           std::int64_t inner,
                           std::int64_t size,
                           std::int64_t begin,
                           std::int64_t full_size) {
  return kernels::cuda::dropout(
      x, p, static_cast<std::uint64_t>(seed), {inner, size, begin, full_size});
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) { m.impl("_dropout_of_part", TORCH_FN(dropout_of_part)); }

}  // namespace weft::ops
