#pragma once

// One process group, by name: resolving it and reducing over it. Every Work that starts here is
// waited for here or by the holder of the returned PendingCollective, messages whose group has
// ended apart.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace weft::ops {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// The group named `group_name`; null for a group of one: the name "" or a group with one rank.
// Errors: one sentence naming the operator `op` where no such group is registered in this process.
ProcessGroupPtr resolve_group(std::string_view op, const std::string& group_name);

// Whether the group carries CPU tensors, too. REQUIRES: a group.
bool has_cpu_backend(const ProcessGroupPtr& group);

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

// A collective in flight. Move-only; wait() before its result is read. Its tensors stay alive with
// it.
class PendingCollective {
 public:
  PendingCollective() = default;
  // Starts `what` with asyncOp as `start` is told: not on CPUs, where the wait drives a collective,
  // and an asynchronous one would mean a thread for it; and not where the caller waits at once.
  PendingCollective(std::string_view op,
                    std::string_view what,
                    const ProcessGroupPtr& group,
                    std::vector<at::Tensor> tensors,
                    bool overlaps,
                    const std::function<c10::intrusive_ptr<c10d::Work>(bool async_op)>& start);

  // Waits until it is done (for CUDA: makes the current stream wait) and forgets the work.
  // Errors: what the backend raises, with operator and rank added.
  void wait();

  // Whether wait() would return, or raise, at once; whether it would raise.
  bool is_done() const;
  bool has_failed() const;

 private:
  std::string op_;
  std::string what_;
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<c10d::Work> work_;
  int rank_ = 0;
};

// Starts the sum of the contiguous `tensor` in place; for a null group or no elements it is done at
// once.
PendingCollective start_all_reduce(std::string_view op,
                                   const at::Tensor& tensor,
                                   const ProcessGroupPtr& group);

// The same as sum_of, in flight. The first is not to be read before the second was waited for.
std::pair<at::Tensor, PendingCollective> start_sum_of(
    std::string_view op,
    at::IntArrayRef sizes,
    const at::TensorOptions& options,
    const ProcessGroupPtr& group,
    const std::function<void(at::Tensor&)>& write);

// True where `tensor` is being traced (compile, export, fake or meta tensors, a dispatch mode):
// then communication must go through a registered operator, in program order, or the trace would
// lose it.
bool is_traced(const at::Tensor& tensor);

}  // namespace weft::ops
