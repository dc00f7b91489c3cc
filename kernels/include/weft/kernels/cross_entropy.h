#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

// The local computations of a vocabulary-parallel cross-entropy, whose logits are sharded over the
// classes: the statistics that one pass over a shard's logits yields, and their gradient.
//
// Shapes: logits and grad_logits [tokens, v], for the classes [vocab_start, vocab_start + v);
// target and grad_losses [tokens]; normalizers [2, tokens]. Any strides are read; logits whose rows
// are not contiguous are copied.
// Dtypes: float32, float64, bfloat16, float16 for logits and grad_logits; int64 or int32 for
// target. The computation and the statistics are in float32, or in float64 for float64 logits;
// grad_losses and normalizers are converted to that dtype, and grad_logits is rounded once.
// Errors: c10::Error, before anything is allocated, if shapes or dtypes are not as above, or if the
// tensors are not on one device of the namespace's type.
//
// A target outside the classes of the logits belongs to another shard.
// Nothing here records autograd history.
namespace weft::kernels {

struct CrossEntropyStatisticsArguments {
  const at::Tensor& logits;
  const at::Tensor& target;
  int64_t vocab_start;
  int64_t ignore_index;  // a target with neither loss nor gradient
  bool wants_sum;        // whether to return the sum of the logits, for label smoothing
};

struct CrossEntropyGradientArguments {
  const at::Tensor& grad_losses;
  const at::Tensor& logits;
  const at::Tensor& target;
  // [2, tokens]: over all shards, the largest logit and the log of the sum of
  // exp(logit - largest).
  const at::Tensor& normalizers;
  int64_t vocab_start;
  int64_t num_classes;  // of all shards together
  int64_t ignore_index;
  double label_smoothing;
};

namespace cpu {

// Returns [tokens, 4]: largest logit, sum of exp(logit - largest), logit of the target (0 if the
// target is ignored or belongs to another shard), sum of the logits (0 unless `wants_sum`). The
// first two are -infinity and 0 if the shard has no classes or all its logits are -infinity.
at::Tensor cross_entropy_statistics(const CrossEntropyStatisticsArguments& arguments);

// Writes the gradient of the logits to `grad_logits`, a contiguous tensor of their shape and dtype.
// It may be `logits` itself.
void cross_entropy_gradient(const CrossEntropyGradientArguments& arguments,
                            const at::Tensor& grad_logits);

}  // namespace cpu

// The same functions for CUDA tensors, in the library weft_kernels_cuda. They run on the current
// stream of the logits' device.
namespace cuda {

at::Tensor cross_entropy_statistics(const CrossEntropyStatisticsArguments& arguments);

void cross_entropy_gradient(const CrossEntropyGradientArguments& arguments,
                            const at::Tensor& grad_logits);

}  // namespace cuda

}  // namespace weft::kernels
