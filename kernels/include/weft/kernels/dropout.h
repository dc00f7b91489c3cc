#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

// Dropout that is independent of sharding: whether an element is dropped depends only on p, the
// seed and the element's position in the unsharded tensor, not on the sharding, the device or the
// number of threads.
//
// Dtypes: float32, float64, bfloat16, float16. Any strides are read; results are contiguous.
// Errors: c10::Error, before anything is allocated, for another dtype or a tensor that is not on
// the namespace's type of device.
namespace weft::kernels {

// The place of x in a tensor that is sharded along one dim. x is viewed as [outer, size, inner],
// the unsharded tensor as [outer, full_size, inner]: x has the entries [begin, begin + size) of the
// middle dim. An unsharded x of n elements is {.inner = 1, .size = n, .begin = 0, .full_size = n}.
struct DropoutPlace {
  int64_t inner;
  int64_t size;
  int64_t begin;
  int64_t full_size;
};

// Returns x / (1 - p), with elements dropped (0) with probability p; 0 everywhere for p = 1. The
// gradient of x is the same function of the gradient of the result.
// REQUIRES: 0 <= p <= 1.
namespace cpu {
at::Tensor dropout(const at::Tensor& x, double p, uint64_t seed, const DropoutPlace& place);
}
namespace cuda {
at::Tensor dropout(const at::Tensor& x, double p, uint64_t seed, const DropoutPlace& place);
}

}  // namespace weft::kernels
