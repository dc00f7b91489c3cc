#pragma once

// Takes the gradients of the weights of column_row_mlp as their two factors, inside the backward.
// An optimizer that steps a weight from the factors, some rows at a time, needs no full gradient.

#include <weft/ops/export.h>

#include <ATen/core/Tensor.h>

#include <memory>

namespace weft::ops {

// Receives the gradients of the weights of one call. The backward calls it in the order w2, w3, w1,
// in the thread of the backward, and while the all-reduce of the input's gradient is in flight.
class WEFT_OPS_API WeightSink {
 public:
  WeightSink() = default;
  WeightSink(const WeightSink&) = delete;
  WeightSink& operator=(const WeightSink&) = delete;
  virtual ~WeightSink();

  // The backward of the call begins; its saved tensors have been unpacked.
  virtual void begin_backward() = 0;

  // The gradient of weight w1, w2 or w3 (`index` 0, 1 or 2), as the operator got it (under
  // autocast: after the cast), is gradᵀ x with grad [..., out] and x [..., in]. Returns whether the
  // sink has used it; then the weight gets no gradient. REQUIRES: autograd would accumulate the
  // gradient into the `.grad` of a leaf.
  virtual bool take(int index, const at::Tensor& grad, const at::Tensor& x) = 0;
};

// While it exists, calls of column_row_mlp on this thread pass the gradients of their weights to
// `sink`, if autograd accumulates them. Calls that are traced by a compiler do not.
class WEFT_OPS_API WeightSinkGuard {
 public:
  explicit WeightSinkGuard(std::shared_ptr<WeightSink> sink);
  WeightSinkGuard(const WeightSinkGuard&) = delete;
  WeightSinkGuard& operator=(const WeightSinkGuard&) = delete;
  ~WeightSinkGuard();

 private:
  std::shared_ptr<WeightSink> previous_;
};

}  // namespace weft::ops
