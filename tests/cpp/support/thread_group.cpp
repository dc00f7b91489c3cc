#include "thread_group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <exception>
#include <stdexcept>
#include <utility>

namespace weft::testing {
namespace {

at::Tensor reduced(const std::vector<at::Tensor>& inputs, c10d::ReduceOp::RedOpType reduce_op) {
  // Half types are summed in float32 and rounded once, so that results do not depend on the order
  // of the ranks.
  const bool is_half = at::isReducedFloatingType(inputs[0].scalar_type());
  const auto dtype = is_half ? at::kFloat : inputs[0].scalar_type();
  at::Tensor result = inputs[0].to(dtype, /*non_blocking=*/false, /*copy=*/true);
  for (size_t rank = 1; rank < inputs.size(); ++rank) {
    const at::Tensor input = inputs[rank].to(dtype);
    switch (reduce_op) {
      case c10d::ReduceOp::SUM:
      case c10d::ReduceOp::AVG:
        result.add_(input);
        break;
      case c10d::ReduceOp::PRODUCT:
        result.mul_(input);
        break;
      case c10d::ReduceOp::MIN:
        result = at::minimum(result, input);
        break;
      case c10d::ReduceOp::MAX:
        result = at::maximum(result, input);
        break;
      default:
        TORCH_INTERNAL_ASSERT(
            false, "reduce op ", static_cast<int>(reduce_op), " passed the check");
    }
  }
  if (reduce_op == c10d::ReduceOp::AVG) {
    result.div_(static_cast<int64_t>(inputs.size()));
  }
  return result;
}

void execute(const std::vector<std::optional<Call>>& calls) {
  // Below ADInplaceOrView: as in a real backend, these writes bump no version counter.
  at::AutoDispatchBelowADInplaceOrView guard;
  const size_t num_ranks = calls.size();
  const Call& first = *calls[0];
  switch (first.collective) {
    case Collective::kAllReduce: {
      std::vector<at::Tensor> inputs;
      for (const auto& call : calls) {
        inputs.push_back(call->inputs[0]);
      }
      const at::Tensor result = reduced(inputs, first.reduce_op);
      for (const auto& call : calls) {
        call->outputs[0].copy_(result);
      }
      break;
    }
    case Collective::kBroadcast:
      for (const auto& call : calls) {
        call->outputs[0].copy_(calls[static_cast<size_t>(first.root)]->inputs[0]);
      }
      break;
    case Collective::kAllGather:
      for (const auto& call : calls) {
        for (size_t from = 0; from < num_ranks; ++from) {
          call->outputs[from].copy_(calls[from]->inputs[0]);
        }
      }
      break;
    case Collective::kReduceScatter:
      for (size_t to = 0; to < num_ranks; ++to) {
        std::vector<at::Tensor> inputs;
        for (const auto& call : calls) {
          inputs.push_back(call->inputs[to]);
        }
        calls[to]->outputs[0].copy_(reduced(inputs, first.reduce_op));
      }
      break;
    case Collective::kBarrier:
      break;
    case Collective::kSend:
    case Collective::kRecv:
      TORCH_INTERNAL_ASSERT(false, "point to point calls do not form operations");
  }
}

}  // namespace

std::string to_string(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kBarrier:
      return "barrier";
    case Collective::kSend:
      return "send";
    case Collective::kRecv:
      return "recv";
  }
  TORCH_INTERNAL_ASSERT(false, "unknown collective ", static_cast<int>(collective));
}

ThreadWork::ThreadWork(int group_rank, c10d::OpType op_type, std::string title)
    : Work(group_rank, op_type), title_(std::move(title)) {}

bool ThreadWork::wait(std::chrono::milliseconds timeout) {
  const auto group = group_.lock();
  if (timeout == kNoTimeout) {
    timeout = group ? group->timeout() : GroupOptions().timeout;
  }
  {
    std::unique_lock lock(mutex_);
    was_waited_for_ = true;
    if (cv_.wait_for(lock, timeout, [this] { return completed_; })) {
      if (exception_) {
        std::rethrow_exception(exception_);
      }
      return true;
    }
  }
  // This work's mutex is unlocked here: missing() locks the group's, which comes first.
  TORCH_CHECK(false,
              title_,
              ": not complete after ",
              timeout.count(),
              " ms; ",
              group ? group->missing(*this) : "its group is gone");
}

bool ThreadWork::isCompleted() {
  const std::lock_guard lock(mutex_);
  was_waited_for_ = was_waited_for_ || completed_;
  return completed_;
}

bool ThreadWork::was_waited_for() const {
  const std::lock_guard lock(mutex_);
  return was_waited_for_;
}

ThreadGroup::ThreadGroup(int group_size, GroupOptions options)
    : group_size_(group_size),
      options_(options),
      next_operation_idx_(static_cast<size_t>(group_size)),
      left_(static_cast<size_t>(group_size)) {
  if (options_.all_reduce_delay.count() > 0) {
    delayed_thread_ = std::jthread([this](const std::stop_token& stop) { finish_delayed(stop); });
  }
}

ThreadGroup::~ThreadGroup() = default;

c10::intrusive_ptr<ThreadWork> ThreadGroup::enter(int group_rank, c10d::OpType op_type, Call call) {
  const auto rank_idx = static_cast<size_t>(group_rank);
  const bool is_delayed =
      call.collective == Collective::kAllReduce && options_.all_reduce_delay.count() > 0;
  std::optional<Operation> complete;
  c10::intrusive_ptr<ThreadWork> work;
  {
    const std::lock_guard lock(mutex_);
    const int64_t operation_idx = next_operation_idx_[rank_idx]++;
    work = c10::make_intrusive<ThreadWork>(group_rank,
                                           op_type,
                                           call.signature + ", operation " +
                                               std::to_string(operation_idx) + ", " +
                                               on_rank(group_rank));
    work->group_ = weak_from_this();
    work->operation_idx_ = operation_idx;
    for (size_t other = 0; other < left_.size(); ++other) {
      if (left_[other] && next_operation_idx_[other] <= operation_idx) {
        fail(*work, work->title() + ": rank " + std::to_string(other) + " " + *left_[other]);
        return work;
      }
    }
    Operation& operation = open_[operation_idx];
    operation.calls.resize(static_cast<size_t>(group_size_));
    operation.works.resize(static_cast<size_t>(group_size_));
    operation.calls[rank_idx] = std::move(call);
    operation.works[rank_idx] = work;
    if (++operation.num_calls == group_size_) {
      complete = std::move(operation);
      open_.erase(operation_idx);
      if (is_delayed) {
        delayed_.emplace_back(Clock::now() + options_.all_reduce_delay, std::move(*complete));
        complete.reset();
        delayed_changed_.notify_one();
      }
    }
  }
  if (complete) {
    finish(*complete);
  }
  return work;
}

void ThreadGroup::finish(const Operation& operation) {
  std::string mismatch;
  for (size_t rank = 1; rank < operation.calls.size(); ++rank) {
    if (operation.calls[rank]->signature != operation.calls[0]->signature) {
      mismatch = "the ranks disagree: rank 0 called " + operation.calls[0]->signature + ", rank " +
                 std::to_string(rank) + " called " + operation.calls[rank]->signature;
      break;
    }
  }
  std::exception_ptr error;
  if (mismatch.empty()) {
    try {
      execute(operation.calls);
    } catch (...) {
      error = std::current_exception();  // rethrown on every rank that waits
    }
  }
  for (const auto& work : operation.works) {
    if (mismatch.empty()) {
      work->finish(error);
    } else {
      fail(*work, work->title() + ": " + mismatch);
    }
  }
}

void ThreadGroup::finish_delayed(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (delayed_changed_.wait(lock, stop, [this] { return !delayed_.empty(); })) {
    const auto due = delayed_.front().first;
    // A group that stops has no owner, so no thread waits for the remaining operations.
    if (delayed_changed_.wait_until(lock, stop, due, [due] { return Clock::now() >= due; })) {
      const Operation operation = std::move(delayed_.front().second);
      delayed_.pop_front();
      lock.unlock();
      finish(operation);
      lock.lock();
    }
    if (stop.stop_requested()) {
      return;
    }
  }
}

c10::intrusive_ptr<ThreadWork> ThreadGroup::send(int group_rank,
                                                 int to_rank,
                                                 int tag,
                                                 at::Tensor tensor) {
  return exchange(group_rank, {group_rank, to_rank, tag}, /*is_send=*/true, std::move(tensor));
}

c10::intrusive_ptr<ThreadWork> ThreadGroup::recv(int group_rank,
                                                 int from_rank,
                                                 int tag,
                                                 at::Tensor tensor) {
  return exchange(group_rank, {from_rank, group_rank, tag}, /*is_send=*/false, std::move(tensor));
}

c10::intrusive_ptr<ThreadWork> ThreadGroup::exchange(int group_rank,
                                                     ChannelKey key,
                                                     bool is_send,
                                                     at::Tensor tensor) {
  const auto [from, to, tag] = key;
  const int peer = is_send ? to : from;
  TORCH_CHECK(peer >= 0 && peer < group_size_ && peer != group_rank,
              is_send ? "send to" : "recv from",
              " rank ",
              peer,
              " ",
              on_rank(group_rank),
              ": the peer must be another rank of the group; pass one below ",
              group_size_);
  auto work = c10::make_intrusive<ThreadWork>(group_rank,
                                              is_send ? c10d::OpType::SEND : c10d::OpType::RECV,
                                              std::string(is_send ? "send to" : "recv from") +
                                                  " rank " + std::to_string(peer) + " with tag " +
                                                  std::to_string(tag) + ", " + on_rank(group_rank));
  work->group_ = weak_from_this();

  const std::lock_guard lock(mutex_);
  Channel& channel = channels_[key];
  auto& mine = is_send ? channel.sends : channel.recvs;
  auto& theirs = is_send ? channel.recvs : channel.sends;
  if (theirs.empty()) {
    const auto& gone = left_[static_cast<size_t>(peer)];
    if (gone) {
      fail(*work, work->title() + ": rank " + std::to_string(peer) + " " + *gone);
    } else {
      mine.push_back({std::move(tensor), work});
    }
    return work;
  }
  const Message other = std::move(theirs.front());
  theirs.pop_front();
  const at::Tensor& source = is_send ? tensor : other.tensor;
  const at::Tensor& target = is_send ? other.tensor : tensor;
  if (source.sizes() != target.sizes() || source.scalar_type() != target.scalar_type()) {
    const std::string mismatch = c10::str(": ",
                                          source.scalar_type(),
                                          source.sizes(),
                                          " was sent where ",
                                          target.scalar_type(),
                                          target.sizes(),
                                          " is received");
    fail(*work, work->title() + mismatch);
    fail(*other.work, other.work->title() + mismatch);
    return work;
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  target.copy_(source);
  work->finish();
  other.work->finish();
  return work;
}

void ThreadGroup::leave(int group_rank, const std::string& reason) {
  const auto rank_idx = static_cast<size_t>(group_rank);
  const std::string why = ": rank " + std::to_string(group_rank) + " " + reason;
  const std::lock_guard lock(mutex_);
  left_[rank_idx] = reason;
  for (auto it = open_.begin(); it != open_.end();) {
    if (it->second.calls[rank_idx]) {
      ++it;
      continue;
    }
    for (const auto& work : it->second.works) {
      if (work) {
        fail(*work, work->title() + why);
      }
    }
    it = open_.erase(it);
  }
  for (auto& [key, channel] : channels_) {
    // The rank's own sends and receives stay, as a peer can still match them.
    const auto& [from, to, tag] = key;
    auto& unmatched = from == group_rank ? channel.recvs : channel.sends;
    if (from == group_rank || to == group_rank) {
      for (const Message& message : unmatched) {
        fail(*message.work, message.work->title() + why);
      }
      unmatched.clear();
    }
  }
}

std::string ThreadGroup::on_rank(int group_rank) const {
  return "on rank " + std::to_string(group_rank) + " of " + std::to_string(group_size_);
}

std::string ThreadGroup::missing(const ThreadWork& work) {
  if (work.operation_idx_ < 0) {
    return "the other rank has not made the matching call";
  }
  const std::lock_guard lock(mutex_);
  std::string names;
  for (size_t rank = 0; rank < next_operation_idx_.size(); ++rank) {
    if (next_operation_idx_[rank] <= work.operation_idx_) {
      names += (names.empty() ? "rank " : ", rank ") + std::to_string(rank);
    }
  }
  return names.empty() ? "every rank has called it, and it is still running"
                       : "not called so far by " + names;
}

void ThreadGroup::fail(ThreadWork& work, const std::string& message) {
  work.finish(std::make_exception_ptr(c10::Error(message, /*backtrace=*/nullptr)));
}

}  // namespace weft::testing
