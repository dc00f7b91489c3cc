#pragma once

// _cross_entropy_statistics and _cross_entropy_gradient on top of the kernels of one device.
// Inline, because both libweft_ops.so and libweft_ops_cuda.so need it and neither exports it.

#include <weft/kernels/cross_entropy.h>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstdint>

namespace weft::ops {

template <auto kStatistics, auto kGradient>
struct CrossEntropyKernels {
  static at::Tensor statistics(const at::Tensor& logits,
                               const at::Tensor& target,
                               std::int64_t vocab_start,
                               std::int64_t ignore_index,
                               bool wants_sum) {
    return kStatistics({.logits = logits,
                        .target = target,
                        .vocab_start = vocab_start,
                        .ignore_index = ignore_index,
                        .wants_sum = wants_sum});
  }

  static void gradient(const at::Tensor& gradient,
                       const at::Tensor& grad,
                       const at::Tensor& logits,
                       const at::Tensor& target,
                       const at::Tensor& normalizers,
                       std::int64_t vocab_start,
                       std::int64_t num_classes,
                       std::int64_t ignore_index,
                       double label_smoothing) {
    kGradient({.grad = grad,
               .logits = logits,
               .target = target,
               .normalizers = normalizers,
               .vocab_start = vocab_start,
               .num_classes = num_classes,
               .ignore_index = ignore_index,
               .label_smoothing = label_smoothing},
              gradient);
  }

  static void register_kernels(torch::Library& m) {
    m.impl("_cross_entropy_statistics", TORCH_FN(statistics));
    m.impl("_cross_entropy_gradient", TORCH_FN(gradient));
  }
};

}  // namespace weft::ops
