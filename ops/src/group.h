#pragma once

// One process group, by name: resolving it and reducing over it. Every Work that starts here is
// waited for here or by the holder of the returned PendingReduce.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <string>
#include <string_view>
#include <utility>

namespace weft::ops {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// The group named `group_name`; null for a group of one: the name "" or a group with one rank.
// Errors: one sentence naming the operator `op` where no such group is registered in this process.
ProcessGroupPtr resolve_group(std::string_view op, const std::string& group_name);

// The sum over `group` of what `write` puts into a contiguous tensor of `sizes` that it is given,
// which need not be the result: a backend may have memory that its peers read. A null group: what
// was written.
at::Tensor sum_of(std::string_view op,
                  at::IntArrayRef sizes,
                  const at::TensorOptions& options,
                  const ProcessGroupPtr& group,
                  const std::function<void(at::Tensor&)>& write);

// Sums the contiguous `tensor` over `group` in place and waits; nothing for a null group or no
// elements (shapes are equal on all ranks, so all skip together).
void all_reduce_(std::string_view op, const at::Tensor& tensor, const ProcessGroupPtr& group);

// Starts a collective, waits for it, and adds operator, `what` failed and rank to what it raises.
void wait_with_context(std::string_view op,
                       std::string_view what,
                       const ProcessGroupPtr& group,
                       const std::function<c10::intrusive_ptr<c10d::Work>()>& start);

// An all-reduce on its way. Move-only; wait() before the tensor is read. The tensor stays alive
// with it.
class PendingReduce {
 public:
  PendingReduce() = default;
  PendingReduce(std::string op, at::Tensor tensor, c10::intrusive_ptr<c10d::Work> work, int rank);

  // Waits until the sum is there (for CUDA: makes the current stream wait) and forgets the work.
  // Errors: what the backend raises, with operator and rank added.
  void wait();

 private:
  std::string op_;
  at::Tensor tensor_;
  c10::intrusive_ptr<c10d::Work> work_;
  int rank_ = 0;
};

// Starts the sum of the contiguous `tensor` in place; for a null group or no elements it is done at
// once.
PendingReduce start_all_reduce(std::string_view op,
                               const at::Tensor& tensor,
                               const ProcessGroupPtr& group);

// The same as sum_of on its way. The first is not to be read before the second was waited for.
std::pair<at::Tensor, PendingReduce> start_sum_of(std::string_view op,
                                                  at::IntArrayRef sizes,
                                                  const at::TensorOptions& options,
                                                  const ProcessGroupPtr& group,
                                                  const std::function<void(at::Tensor&)>& write);

// True where `tensor` is being traced (compile, export, fake or meta tensors, a dispatch mode):
// then communication must go through a registered operator, in program order, or the trace would
// lose it.
bool is_traced(const at::Tensor& tensor);

}  // namespace weft::ops
