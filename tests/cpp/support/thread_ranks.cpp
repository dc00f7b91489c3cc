#include "thread_ranks.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <exception>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

namespace weft::testing {
namespace {

std::string describe(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), tensor.sizes());
}

std::string to_string(c10d::ReduceOp::RedOpType reduce_op) {
  switch (reduce_op) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "avg";
    case c10d::ReduceOp::PRODUCT:
      return "product";
    case c10d::ReduceOp::MIN:
      return "min";
    case c10d::ReduceOp::MAX:
      return "max";
    default:
      return "";
  }
}

int64_t total_bytes(const std::vector<at::Tensor>& tensors) {
  int64_t num_bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    num_bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return num_bytes;
}

// Returns views of `num_segments` consecutive segments of `buffer`, each of the shape of `segment`.
std::vector<at::Tensor> segments(const at::Tensor& buffer,
                                 const at::Tensor& segment,
                                 int num_segments) {
  std::vector<at::Tensor> result;
  const at::Tensor flat = buffer.detach().view(-1);
  for (int64_t idx = 0; idx < num_segments; ++idx) {
    result.push_back(flat.narrow(0, idx * segment.numel(), segment.numel()).view(segment.sizes()));
  }
  return result;
}

}  // namespace

ThreadBackend::ThreadBackend(std::shared_ptr<ThreadGroup> group, int group_rank)
    : Backend(group_rank, group->size()), group_(std::move(group)) {}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                        const c10d::AllreduceOptions& opts) {
  check_count(Collective::kAllReduce, tensors.size(), 1);
  check(Collective::kAllReduce, tensors[0]);
  const c10d::ReduceOp::RedOpType reduce_op = opts.reduceOp;
  check_reduction(Collective::kAllReduce, tensors[0], reduce_op);
  const std::string signature =
      "all_reduce(" + to_string(reduce_op) + ", " + describe(tensors[0]) + ")";
  return issue(c10d::OpType::ALLREDUCE,
               {Collective::kAllReduce, signature, tensors, tensors, reduce_op});
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                        const c10d::BroadcastOptions& opts) {
  check_count(Collective::kBroadcast, tensors.size(), 1);
  check(Collective::kBroadcast, tensors[0]);
  const auto root = static_cast<int>(opts.rootRank);
  TORCH_CHECK(root >= 0 && root < getSize(),
              "broadcast on rank ",
              getRank(),
              ": root rank ",
              root,
              " is not in the group; pass one from 0 to ",
              getSize() - 1);
  const std::string signature =
      "broadcast(root " + std::to_string(root) + ", " + describe(tensors[0]) + ")";
  return issue(c10d::OpType::BROADCAST,
               {Collective::kBroadcast, signature, tensors, tensors, c10d::ReduceOp::SUM, root});
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::allgather(
    std::vector<std::vector<at::Tensor>>& output_lists,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& /*opts*/) {
  check_count(Collective::kAllGather, inputs.size(), 1);
  check_count(Collective::kAllGather, output_lists.size(), 1);
  check_count(Collective::kAllGather, output_lists[0].size(), getSize());
  check(Collective::kAllGather, inputs[0]);
  for (const at::Tensor& output : output_lists[0]) {
    check(Collective::kAllGather, output);
    TORCH_CHECK(
        output.sizes() == inputs[0].sizes() && output.scalar_type() == inputs[0].scalar_type(),
        "all_gather on rank ",
        getRank(),
        ": output ",
        describe(output),
        " for input ",
        describe(inputs[0]),
        "; pass outputs of the input's shape and dtype");
  }
  return issue(
      c10d::OpType::ALLGATHER,
      {Collective::kAllGather, "all_gather(" + describe(inputs[0]) + ")", inputs, output_lists[0]});
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& /*opts*/) {
  check(Collective::kAllGather, input);
  check(Collective::kAllGather, output);
  TORCH_CHECK(
      output.numel() == input.numel() * getSize() && output.scalar_type() == input.scalar_type(),
      "all_gather on rank ",
      getRank(),
      ": output ",
      describe(output),
      " for input ",
      describe(input),
      " on ",
      getSize(),
      " ranks; pass an output of input size x ranks");
  return issue(c10d::OpType::_ALLGATHER_BASE,
               {Collective::kAllGather,
                "all_gather(" + describe(input) + ")",
                {input},
                segments(output, input, getSize())});
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::reduce_scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& input_lists,
    const c10d::ReduceScatterOptions& opts) {
  check_count(Collective::kReduceScatter, outputs.size(), 1);
  check_count(Collective::kReduceScatter, input_lists.size(), 1);
  check_count(Collective::kReduceScatter, input_lists[0].size(), getSize());
  check(Collective::kReduceScatter, outputs[0]);
  for (const at::Tensor& input : input_lists[0]) {
    check(Collective::kReduceScatter, input);
    TORCH_CHECK(
        input.sizes() == outputs[0].sizes() && input.scalar_type() == outputs[0].scalar_type(),
        "reduce_scatter on rank ",
        getRank(),
        ": input ",
        describe(input),
        " for output ",
        describe(outputs[0]),
        "; pass inputs of the output's shape and dtype");
  }
  const c10d::ReduceOp::RedOpType reduce_op = opts.reduceOp;
  check_reduction(Collective::kReduceScatter, outputs[0], reduce_op);
  const std::string signature =
      "reduce_scatter(" + to_string(reduce_op) + ", " + describe(outputs[0]) + ")";
  return issue(c10d::OpType::REDUCE_SCATTER,
               {Collective::kReduceScatter, signature, input_lists[0], outputs, reduce_op});
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  check(Collective::kReduceScatter, input);
  check(Collective::kReduceScatter, output);
  TORCH_CHECK(
      input.numel() == output.numel() * getSize() && input.scalar_type() == output.scalar_type(),
      "reduce_scatter on rank ",
      getRank(),
      ": input ",
      describe(input),
      " for output ",
      describe(output),
      " on ",
      getSize(),
      " ranks; pass an input of output size x ranks");
  const c10d::ReduceOp::RedOpType reduce_op = opts.reduceOp;
  check_reduction(Collective::kReduceScatter, output, reduce_op);
  const std::string signature =
      "reduce_scatter(" + to_string(reduce_op) + ", " + describe(output) + ")";
  return issue(c10d::OpType::_REDUCE_SCATTER_BASE,
               {Collective::kReduceScatter,
                signature,
                segments(input, output, getSize()),
                {output},
                reduce_op});
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::barrier(const c10d::BarrierOptions& /*opts*/) {
  return issue(c10d::OpType::BARRIER, {Collective::kBarrier, "barrier()", {}, {}});
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::send(std::vector<at::Tensor>& tensors,
                                                   int to_rank,
                                                   int tag) {
  check_count(Collective::kSend, tensors.size(), 1);
  check(Collective::kSend, tensors[0]);
  return counted(
      Collective::kSend, total_bytes(tensors), group_->send(getRank(), to_rank, tag, tensors[0]));
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::recv(std::vector<at::Tensor>& tensors,
                                                   int from_rank,
                                                   int tag) {
  check_count(Collective::kRecv, tensors.size(), 1);
  check(Collective::kRecv, tensors[0]);
  return counted(
      Collective::kRecv, total_bytes(tensors), group_->recv(getRank(), from_rank, tag, tensors[0]));
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::issue(c10d::OpType op_type, Call call) {
  const Collective collective = call.collective;
  const int64_t num_bytes = total_bytes(call.inputs);
  return counted(collective, num_bytes, group_->enter(getRank(), op_type, std::move(call)));
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::counted(Collective collective,
                                                      int64_t num_bytes,
                                                      c10::intrusive_ptr<ThreadWork> work) {
  const std::lock_guard lock(mutex_);
  CallCount& count = counts_.at(static_cast<size_t>(collective));
  ++count.num_calls;
  count.num_bytes += num_bytes;
  issued_.push_back(work);
  return work;
}

CallCount ThreadBackend::count(Collective collective) const {
  const std::lock_guard lock(mutex_);
  return counts_.at(static_cast<size_t>(collective));
}

int64_t ThreadBackend::num_calls() const {
  const std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (const CallCount& count : counts_) {
    total += count.num_calls;
  }
  return total;
}

void ThreadBackend::reset_counts() {
  const std::lock_guard lock(mutex_);
  counts_ = {};
}

std::vector<std::string> ThreadBackend::unwaited() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> titles;
  for (const auto& work : issued_) {
    if (!work->was_waited_for()) {
      titles.push_back(work->title());
    }
  }
  return titles;
}

void ThreadBackend::check(Collective collective, const at::Tensor& tensor) const {
  TORCH_CHECK(tensor.defined() && tensor.device().is_cpu() && tensor.is_contiguous(),
              to_string(collective),
              " on rank ",
              getRank(),
              ": the tensor is ",
              !tensor.defined()          ? std::string("undefined")
              : tensor.device().is_cpu() ? std::string("not contiguous")
                                         : "on " + tensor.device().str(),
              "; pass a contiguous CPU tensor");
}

void ThreadBackend::check_count(Collective collective, size_t num_tensors, int expected) const {
  TORCH_CHECK(num_tensors == static_cast<size_t>(expected),
              to_string(collective),
              " on rank ",
              getRank(),
              ": got ",
              num_tensors,
              " tensors in a list; pass ",
              expected);
}

void ThreadBackend::check_reduction(Collective collective,
                                    const at::Tensor& tensor,
                                    c10d::ReduceOp::RedOpType reduce_op) const {
  TORCH_CHECK(!to_string(reduce_op).empty(),
              to_string(collective),
              " on rank ",
              getRank(),
              ": reduce op ",
              static_cast<int>(reduce_op),
              " is not supported by this backend; use sum, avg, product, min or max");
  TORCH_CHECK(tensor.is_floating_point() ||
                  (reduce_op != c10d::ReduceOp::AVG && tensor.scalar_type() == at::kLong),
              to_string(collective),
              " on rank ",
              getRank(),
              ": cannot compute the ",
              to_string(reduce_op),
              " of ",
              tensor.scalar_type(),
              "; use floating point, or int64 without avg");
}

namespace {

// For its lifetime, each thread has its own registry of group names.
class IsolationMode {
 public:
  IsolationMode() { c10d::set_thread_isolation_mode(true); }
  ~IsolationMode() { c10d::set_thread_isolation_mode(false); }
  IsolationMode(const IsolationMode&) = delete;
  IsolationMode& operator=(const IsolationMode&) = delete;
};

RankContext join_group(const std::shared_ptr<ThreadGroup>& group,
                       int group_rank,
                       const std::string& group_name) {
  auto backend = c10::make_intrusive<ThreadBackend>(group, group_rank);
  auto process_group = c10::make_intrusive<c10d::ProcessGroup>(
      c10::make_intrusive<c10d::HashStore>(), group_rank, group->size());
  process_group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  process_group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  process_group->setGroupName(group_name);
  c10d::register_process_group(group_name, process_group);
  return {group_rank, group->size(), group_name, process_group, backend};
}

// Returns nullopt if `body` succeeds on this rank, else the text of its error.
std::optional<std::string> run_rank(RankContext& context,
                                    const std::function<void(RankContext&)>& body,
                                    bool require_waits) {
  try {
    body(context);
    const auto unwaited = context.backend->unwaited();
    if (require_waits && !unwaited.empty()) {
      return "there was no wait for " + unwaited.front() + " (" + std::to_string(unwaited.size()) +
             " in all)";
    }
    return std::nullopt;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

void run_ranks(int num_ranks,
               const std::function<void(RankContext&)>& body,
               const RankOptions& options) {
  TORCH_CHECK(num_ranks >= 1, "run_ranks got ", num_ranks, " ranks; pass at least 1");
  const IsolationMode isolation;
  at::set_num_threads(1);
  const auto group = std::make_shared<ThreadGroup>(num_ranks, options.group);
  std::mutex mutex;
  std::optional<std::string> first_failure;
  {
    std::vector<std::jthread> threads;
    for (int group_rank = 0; group_rank < num_ranks; ++group_rank) {
      threads.emplace_back([&, group_rank] {
        RankContext context = join_group(group, group_rank, options.group_name);
        const auto failure = run_rank(context, body, options.require_waits);
        if (failure) {
          const std::lock_guard lock(mutex);
          if (!first_failure) {
            first_failure = "rank " + std::to_string(group_rank) + " of " +
                            std::to_string(num_ranks) + " failed: " + *failure;
          }
        }
        // After the failure is recorded, so that the failures it causes on other ranks come second.
        group->leave(group_rank, failure ? "failed: " + *failure : "has ended");
        c10d::unregister_process_group(options.group_name);
      });
    }
  }
  if (first_failure) {
    throw std::runtime_error(*first_failure);
  }
}

}  // namespace weft::testing
