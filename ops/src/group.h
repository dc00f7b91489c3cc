#pragma once

// Resolves a process group by its name, and reduces over it. The operators start all communication
// as PendingCollectives and wait for each one, except for pipeline messages that are complete or
// whose group was destroyed.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace weft::ops {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Returns the group named `group_name`; null for a group of one: the name "" or a group with one
// rank. Errors: ValueError naming the operator `op` if no such group is registered in this process.
ProcessGroupPtr resolve_group(std::string_view op, const std::string& group_name);

// Whether the group has a backend for CPU tensors. REQUIRES: group is not null.
bool has_cpu_backend(const ProcessGroupPtr& group);

// Returns the sum over `group` of the tensors that `write` produces. `write` gets a contiguous
// uninitialized tensor of `sizes` to fill; with weft's backend this may be a staging buffer that
// the peers read, which saves a copy. For a null group, returns what was written.
at::Tensor all_reduce_from_writer(std::string_view op,
                                  at::IntArrayRef sizes,
                                  const at::TensorOptions& options,
                                  const ProcessGroupPtr& group,
                                  const std::function<void(at::Tensor&)>& write);

// Sums the contiguous `tensor` over `group` in place and waits. Does nothing for a null group or an
// empty tensor (shapes are equal on all ranks, so all ranks skip it).
void all_reduce_(std::string_view op, const at::Tensor& tensor, const ProcessGroupPtr& group);

// A collective in flight, which keeps its tensors alive. Move-only. Call wait() before its result
// is read.
class PendingCollective {
 public:
  PendingCollective() = default;
  // Calls `start`. `overlaps`: the caller computes before it waits. async_op is `overlaps`, but
  // false for CPU tensors: an asynchronous collective would need another thread, while a
  // synchronous one makes progress in wait(). On CUDA, a synchronous collective runs on the current
  // stream; an asynchronous one costs two events that order the backend's stream, and is worth them
  // only if it overlaps. `what` names the collective in errors. REQUIRES: group is not null;
  // `tensors` holds at least one tensor, all on one device.
  PendingCollective(std::string_view op,
                    std::string_view what,
                    const ProcessGroupPtr& group,
                    std::vector<at::Tensor> tensors,
                    bool overlaps,
                    const std::function<c10::intrusive_ptr<c10d::Work>(bool async_op)>& start);

  // Waits until the collective is done (CUDA: makes the current stream wait) and releases it.
  // Errors: those of the backend, with operator and rank added.
  void wait();

  // Whether wait() would return or raise immediately.
  bool is_done() const;
  // Whether wait() would raise immediately.
  bool has_failed() const;

 private:
  std::string op_;
  std::string what_;
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<c10d::Work> work_;
  int rank_ = 0;
};

// A batch of messages that the backend runs at once, when it ends. If an error leaves the batch, it
// is ended all the same, as later calls of this thread would otherwise join it; an error of that
// end is dropped for the one that left the batch. REQUIRES: backend->supportsCoalescing().
class CoalescedBatch {
 public:
  explicit CoalescedBatch(c10::intrusive_ptr<c10d::Backend> backend);
  CoalescedBatch(const CoalescedBatch&) = delete;
  CoalescedBatch& operator=(const CoalescedBatch&) = delete;
  ~CoalescedBatch();

  // Ends the batch. Call it once.
  c10::intrusive_ptr<c10d::Work> end();

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
  bool is_open_ = true;
};

// Starts all_reduce_from_writer. Wait for the second result before reading the first. `overlaps`:
// see PendingCollective.
std::pair<at::Tensor, PendingCollective> start_all_reduce_from_writer(
    std::string_view op,
    at::IntArrayRef sizes,
    const at::TensorOptions& options,
    const ProcessGroupPtr& group,
    bool overlaps,
    const std::function<void(at::Tensor&)>& write);

// Whether this thread computes a dry run, in which most tensors have no values: see
// <weft/ops/dry_run.h>.
bool is_dry_run();

// Returns whether `tensor` is being traced (compile, export, fake or meta tensors, a dispatch
// mode). Communication must then use a registered operator, in program order, or the trace would
// lack it.
bool is_traced(const at::Tensor& tensor);

}  // namespace weft::ops
