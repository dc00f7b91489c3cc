#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

// Dropout by place: whether an element is dropped depends on the seed and on its place in the whole
// tensor alone, not on how that is cut, on which device or on how many threads.
//
// Dtypes: float32, float64, bfloat16, float16. Any strides are read; results are contiguous.
// Errors: c10::Error for another dtype or device, before anything is allocated.
namespace weft::kernels {

// Where x lies in the whole tensor, which is cut along one dim: as [outer, size, inner], x has
// entries [begin, begin + size) of `whole_size`. A whole tensor is one with outer 1.
struct DropoutPlace {
  int64_t inner;
  int64_t size;
  int64_t begin;
  int64_t whole_size;
};

// x / (1 - p) where kept and 0 where dropped, with probability p; 0 everywhere for p = 1. Its own
// gradient with respect to x is the same function of the gradient.
// REQUIRES: 0 <= p <= 1.
namespace cpu {
at::Tensor dropout(const at::Tensor& x, double p, uint64_t seed, const DropoutPlace& place);
}
namespace cuda {
at::Tensor dropout(const at::Tensor& x, double p, uint64_t seed, const DropoutPlace& place);
}

}  // namespace weft::kernels
