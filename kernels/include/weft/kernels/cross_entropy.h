#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

// The local half of a cross-entropy over classes of which the logits have a part: what one pass
// over them finds out, and their gradient.
//
// Shapes: logits and gradient [tokens, v], of the classes vocab_start to vocab_start + v; target,
// grad and the two halves of normalizers [tokens]. Any strides are read, without a copy those whose
// rows are contiguous.
// Dtypes: float32, float64, bfloat16, float16 for logits and gradient, int64 or int32 for target.
// Half types are computed in float32 and rounded once. Statistics, grad and normalizers are
// float32, or float64 for float64.
// Errors: c10::Error when shapes, dtypes or devices disagree, before anything is allocated.
//
// A target may lie outside of the classes of the logits: then it is another part's.
// Nothing here records autograd history.
namespace weft::kernels {

struct CrossEntropyStatisticsArguments {
  const at::Tensor& logits;
  const at::Tensor& target;
  int64_t vocab_start;
  int64_t ignore_index;  // a target without loss and gradient
  bool wants_sum;        // of the logits, for label smoothing
};

struct CrossEntropyGradientArguments {
  const at::Tensor& grad;  // of the losses
  const at::Tensor& logits;
  const at::Tensor& target;
  // [2, tokens]: the largest logit of all parts, and the log of the sum of exp(logit - largest).
  const at::Tensor& normalizers;
  int64_t vocab_start;
  int64_t num_classes;  // of all parts
  int64_t ignore_index;
  double label_smoothing;
};

namespace cpu {

// [tokens, 4]: largest logit, sum of exp(logit - largest), logit of the target (0 where it is
// ignored or another part's), sum of the logits (0 unless wanted). Without classes, or with
// classes that are all masked out: -infinity and 0.
at::Tensor cross_entropy_statistics(const CrossEntropyStatisticsArguments& arguments);

// Writes the gradient of the logits to `gradient`, contiguous and of their shape and dtype, which
// may be `logits` itself.
void cross_entropy_gradient(const CrossEntropyGradientArguments& arguments,
                            const at::Tensor& gradient);

}  // namespace cpu

// The same functions for CUDA tensors, in the library weft_kernels_cuda. They run on the current
// stream of the logits' device.
namespace cuda {

at::Tensor cross_entropy_statistics(const CrossEntropyStatisticsArguments& arguments);

void cross_entropy_gradient(const CrossEntropyGradientArguments& arguments,
                            const at::Tensor& gradient);

}  // namespace cuda

}  // namespace weft::kernels
