#include "group.h"

#include "all_reduce_from_writer.h"
#include "raise.h"

#include <weft/collectives/error.h>
#include <weft/ops/dry_run.h>

#include <ATen/ops/empty.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <stdexcept>
#include <utility>
#include <vector>

namespace weft::ops {

namespace {

constexpr std::string_view kAllReduce = "all-reduce";

// Runs `step` and adds operator, collective and rank to the errors of the backend. Exceptions of a
// backend written in Python are not std::runtime_error and pass unchanged.
template <typename Step>
auto with_context(std::string_view op, std::string_view what, int rank, Step step) {
  const collectives::RaiseContext context(op, what, rank);
  try {
    return step();
  } catch (const collectives::CollectiveError& error) {
    collectives::throw_error(error.kind(), context.text() + ": " + error.what());
  } catch (c10::Error& error) {
    error.add_context(context.text());
    throw;
  } catch (const std::runtime_error& error) {
    TORCH_CHECK_WITH(DistBackendError, false, context.text(), ": ", error.what());
  }
}

}  // namespace

ProcessGroupPtr resolve_group(std::string_view op, const std::string& group_name) {
  if (group_name.empty()) {
    return {};
  }
  ProcessGroupPtr group;
  // The registry throws for unknown names; c10d::is_process_group_registered is newer than torch
  // 2.11.
  try {
    group = c10d::resolve_process_group(group_name);
  } catch (const c10::Error&) {
    TORCH_CHECK_VALUE(
        false,
        op,
        ": got group_name '",
        group_name,
        "', which is no process group of this process; pass the group_name of a group "
        "made with torch.distributed or DeviceMesh (rebind a loaded module with "
        "weft.nn.rebind_group), or '' for a group of one.");
  }
  return group->getSize() > 1 ? group : ProcessGroupPtr();
}

bool has_cpu_backend(const ProcessGroupPtr& group) {
  try {
    return group->getBackend(c10::DeviceType::CPU).defined();
  } catch (const c10::Error&) {
    return false;
  }
}

PendingCollective::PendingCollective(
    std::string_view op,
    std::string_view what,
    const ProcessGroupPtr& group,
    std::vector<at::Tensor> tensors,
    bool overlaps,
    const std::function<c10::intrusive_ptr<c10d::Work>(bool async_op)>& start)
    : op_(op), what_(what), tensors_(std::move(tensors)), rank_(group->getRank()) {
  const bool async_op = overlaps && !tensors_.front().is_cpu();
  work_ = with_context(op_, what_, rank_, [&] { return start(async_op); });
}

void PendingCollective::wait() {
  const auto work = std::exchange(work_, {});
  if (work) {
    with_context(op_, what_, rank_, [&] { work->wait(); });
  }
  tensors_.clear();
}

bool PendingCollective::is_done() const { return !work_ || work_->isCompleted(); }

bool PendingCollective::has_failed() const {
  return work_ && work_->isCompleted() && work_->exception() != nullptr;
}

namespace {

// Starts to sum `tensor` over `group`, in place. `overlaps`: see PendingCollective.
PendingCollective start_all_reduce(std::string_view op,
                                   const at::Tensor& tensor,
                                   const ProcessGroupPtr& group,
                                   bool overlaps) {
  if (!group || tensor.numel() == 0) {
    return {};
  }
  TORCH_INTERNAL_ASSERT(tensor.is_non_overlapping_and_dense());
  return {op, kAllReduce, group, {tensor}, overlaps, [&](bool async_op) {
            std::vector<at::Tensor> tensors{tensor};
            c10d::AllreduceOptions opts;
            opts.asyncOp = async_op;
            return group->allreduce(tensors, opts);
          }};
}

}  // namespace

std::pair<at::Tensor, PendingCollective> start_all_reduce_from_writer(
    std::string_view op,
    at::IntArrayRef sizes,
    const at::TensorOptions& options,
    const ProcessGroupPtr& group,
    bool overlaps,
    const std::function<void(at::Tensor&)>& write) {
  auto result = at::empty(sizes, options);
  if (group && result.is_cpu() && result.numel() > 0 && !is_traced(result)) {
    c10::intrusive_ptr<c10d::Work> work;
    PendingCollective pending(op, kAllReduce, group, {result}, false, [&](bool /*async_op*/) {
      return work = collectives::all_reduce_from_writer(*group, result, write);
    });
    if (work) {
      return {result, std::move(pending)};
    }
  }
  write(result);
  auto pending = start_all_reduce(op, result, group, overlaps);
  return {std::move(result), std::move(pending)};
}

at::Tensor all_reduce_from_writer(std::string_view op,
                                  at::IntArrayRef sizes,
                                  const at::TensorOptions& options,
                                  const ProcessGroupPtr& group,
                                  const std::function<void(at::Tensor&)>& write) {
  auto [result, pending] =
      start_all_reduce_from_writer(op, sizes, options, group, /*overlaps=*/false, write);
  pending.wait();
  return result;
}

void all_reduce_(std::string_view op, const at::Tensor& tensor, const ProcessGroupPtr& group) {
  start_all_reduce(op, tensor, group, false).wait();
}

namespace {

thread_local bool runs_dry = false;

}  // namespace

bool set_dry_run(bool is_on) { return std::exchange(runs_dry, is_on); }

bool is_dry_run() { return runs_dry; }

CoalescedBatch::CoalescedBatch(c10::intrusive_ptr<c10d::Backend> backend)
    : backend_(std::move(backend)) {
  backend_->startCoalescing();
}

CoalescedBatch::~CoalescedBatch() {
  if (!is_open_) {
    return;
  }
  try {
    backend_->endCoalescing();
  } catch (const std::exception&) {
    // dropped: see the header
  }
}

c10::intrusive_ptr<c10d::Work> CoalescedBatch::end() {
  is_open_ = false;
  return backend_->endCoalescing();
}

bool is_traced(const at::Tensor& tensor) {
  if (is_dry_run()) {
    return false;
  }
  const auto keys = tensor.key_set();
  return c10::impl::TorchDispatchModeTLS::any_modes_set() || tensor.is_meta() ||
         keys.has(c10::DispatchKey::Python) || keys.has(c10::DispatchKey::Functionalize);
}

}  // namespace weft::ops
