#pragma once

// A sink receives the weight gradients of column_row_mlp during the backward, each as the two
// factors of gradᵀ x. An optimizer that steps a weight from the factors, some rows at a time, needs
// no full gradient.

#include <weft/ops/export.h>

#include <ATen/core/Tensor.h>

#include <memory>

namespace weft::ops {

// Receives the gradients of the weights of one or more calls of column_row_mlp. The backward of a
// call runs begin_backward() and then take() for w2, w3 and w1, all on the thread that runs the
// backward. The collective on the gradient of the MLP's input may be in flight during take().
class WEFT_OPS_API WeightSink {
 public:
  WeightSink() = default;
  WeightSink(const WeightSink&) = delete;
  WeightSink& operator=(const WeightSink&) = delete;
  virtual ~WeightSink();

  // The backward of a call begins; autograd has read the saved weights, so the sink may modify
  // weights in place from now on.
  virtual void begin_backward() = 0;

  // The gradient of weight w1, w2 or w3 (`index` 0, 1 or 2) is gradᵀ x with grad [..., out], the
  // gradient of that linear layer's output, and x [..., in], its input. Under autocast, the
  // gradient is that of the cast weight. Returns whether the sink has used the gradient; if so,
  // autograd gets none. Called only if autograd would accumulate the gradient into the `.grad` of a
  // leaf.
  virtual bool take(int index, const at::Tensor& grad, const at::Tensor& x) = 0;
};

// The backward of each column_row_mlp that this thread calls while the guard exists passes the
// gradients of the weights to `sink`, if autograd accumulates them. Calls that a compiler traces
// pass no gradients to the sink.
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
