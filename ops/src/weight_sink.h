#pragma once

#include <weft/ops/weight_sink.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <cstddef>
#include <memory>

namespace weft::ops {

// Returns the sink of this thread's innermost WeightSinkGuard; null without a guard.
const std::shared_ptr<WeightSink>& current_weight_sink();

// The weights of one call of column_row_mlp, with the sink that may use their gradients: see
// <weft/ops/weight_sink.h>.
class SinkableWeights {
 public:
  SinkableWeights() = default;
  SinkableWeights(std::shared_ptr<WeightSink> sink,
                  const at::Tensor& w1,
                  const at::Tensor& w2,
                  const at::Tensor& w3);

  void begin_backward() const;

  // Calls WeightSink::take for w1, w2 or w3 (`index` 0, 1 or 2) and returns its result; returns
  // false without a sink, or if the running backward does not accumulate the gradient into a leaf.
  bool take(std::size_t index, const at::Tensor& grad, const at::Tensor& x) const;

 private:
  std::shared_ptr<WeightSink> sink_;
  // The nodes that receive the gradients. The type of a pointer to a node depends on torch's
  // version.
  std::array<decltype(torch::autograd::Edge::function), 3> nodes_;
};

}  // namespace weft::ops
