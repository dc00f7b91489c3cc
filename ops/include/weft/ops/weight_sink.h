#pragma once

// A sink takes the gradients of the weights of column_row_mlp inside the backward, each as its two
// factors. An optimizer that steps a weight from the factors, some rows at a time, needs no full
// gradient.

#include <weft/ops/export.h>

#include <ATen/core/Tensor.h>

#include <memory>

namespace weft::ops {

// Receives the gradients of the weights of one or more calls of column_row_mlp. The backward of a
// call runs begin_backward() and then take() for w2, w3 and w1, in its own thread. Without
// `sequence_dim`, the all-reduce of x's gradient is in flight during take().
class WEFT_OPS_API WeightSink {
 public:
  WeightSink() = default;
  WeightSink(const WeightSink&) = delete;
  WeightSink& operator=(const WeightSink&) = delete;
  virtual ~WeightSink();

  // The backward of a call begins; the weights that the call saved have been unpacked.
  virtual void begin_backward() = 0;

  // The gradient of weight w1, w2 or w3 (`index` 0, 1 or 2) is gradᵀ x with grad [..., out] and x
  // [..., in]; under autocast, it is the gradient of the weight after the cast. Returns whether the
  // sink has used the gradient; autograd then gets none. Called only if autograd would accumulate
  // the gradient into the `.grad` of a leaf.
  virtual bool take(int index, const at::Tensor& grad, const at::Tensor& x) = 0;
};

// The backward of each column_row_mlp that this thread calls while the guard exists passes the
// gradients of the weights to `sink`, if autograd accumulates them. Calls that are traced by a
// compiler do not use the sink.
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
