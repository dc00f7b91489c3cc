#include "weight_sink.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace weft::ops {

namespace {

using torch::autograd::Node;

thread_local std::shared_ptr<WeightSink> current_sink;

auto node_of(const at::Tensor& weight) {
  return weight.defined() && weight.requires_grad()
             ? torch::autograd::impl::gradient_edge(weight).function
             : decltype(torch::autograd::Edge::function)();
}

// Returns whether the running backward accumulates the gradient that `node` receives into a leaf: a
// chain of nodes with one input each, such as casts and views, leads to the leaf, and the backward
// includes the leaf and, unlike torch.autograd.grad, does not return its gradient.
bool accumulates(const Node* node) {
  while (node != nullptr && node->num_outputs() == 1 && node->next_edge(0).is_valid()) {
    node = node->next_edge(0).function.get();
  }
  if (node == nullptr || node->num_outputs() != 0) return false;
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  auto* key = const_cast<Node*>(node);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  if (nodes == nullptr || exec_info == nullptr || nodes->count(key) == 0) return false;
  if (exec_info->empty()) return true;
  const auto found = exec_info->find(key);
  return found != exec_info->end() && found->second.should_execute() &&
         found->second.captures_ == nullptr;
}

}  // namespace

WeightSink::~WeightSink() = default;

WeightSinkGuard::WeightSinkGuard(std::shared_ptr<WeightSink> sink)
    : previous_(std::exchange(current_sink, std::move(sink))) {}

WeightSinkGuard::~WeightSinkGuard() { current_sink = std::move(previous_); }

const std::shared_ptr<WeightSink>& current_weight_sink() { return current_sink; }

SinkableWeights::SinkableWeights(std::shared_ptr<WeightSink> sink,
                                 const at::Tensor& w1,
                                 const at::Tensor& w2,
                                 const at::Tensor& w3)
    : sink_(std::move(sink)) {
  if (sink_ != nullptr) nodes_ = {node_of(w1), node_of(w2), node_of(w3)};
}

void SinkableWeights::begin_backward() const {
  if (sink_ != nullptr) sink_->begin_backward();
}

bool SinkableWeights::take(std::size_t index, const at::Tensor& grad, const at::Tensor& x) const {
  return sink_ != nullptr && accumulates(nodes_.at(index).get()) &&
         sink_->take(static_cast<int>(index), grad, x);
}

}  // namespace weft::ops
