// Matches the collective calls of ranks that are threads of one process, and executes them.
//
// An *operation* consists of one *call* from each rank; the n-th collective call of a rank belongs
// to operation n. An operation runs once every rank has called it, on the thread of the last one
// (or, delayed, on a helper thread). Nothing is read or written before that moment, so a result
// used too early is the unreduced input, and an input changed too early changes the result. As with
// gloo, operations in flight at the same time may end in any order.
//
// Lock order: ThreadGroup's mutex, then a work's.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace weft::testing {

enum class Collective {
  kAllReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kBarrier,
  kSend,
  kRecv
};

std::string to_string(Collective collective);

class ThreadGroup;

// One rank's handle to one operation.
class ThreadWork final : public c10d::Work {
 public:
  // `title` names call and rank in errors: "all_reduce(sum, Float[4]), operation 3, on rank 0 of
  // 2".
  ThreadWork(int group_rank, c10d::OpType op_type, std::string title);

  // Returns true, or throws the operation's error. kNoTimeout means the group's timeout. After a
  // timeout, throws c10::Error that names the ranks that have not made their call.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  bool isCompleted() override;

  bool was_waited_for() const;
  const std::string& title() const { return title_; }

 private:
  friend class ThreadGroup;

  const std::string title_;
  std::weak_ptr<ThreadGroup> group_;  // set by ThreadGroup, which holds unfinished works
  int64_t operation_idx_ = -1;        // -1: point-to-point
  bool was_waited_for_ = false;       // guarded by mutex_
};

struct Call {
  Collective collective;
  // A readable description that must be equal on every rank: "all_reduce(sum, Float[4])".
  std::string signature;
  std::vector<at::Tensor> inputs;   // contiguous
  std::vector<at::Tensor> outputs;  // contiguous; may be the inputs
  c10d::ReduceOp::RedOpType reduce_op = c10d::ReduceOp::SUM;
  int root = 0;
};

struct GroupOptions {
  std::chrono::milliseconds timeout{20'000};
  // How long after its last call an all-reduce completes, on another thread. Default: at once.
  std::chrono::milliseconds all_reduce_delay{0};
};

class ThreadGroup : public std::enable_shared_from_this<ThreadGroup> {
 public:
  ThreadGroup(int group_size, GroupOptions options);
  ~ThreadGroup();

  // Adds a rank's call to its next operation. Thread-safe.
  c10::intrusive_ptr<ThreadWork> enter(int group_rank, c10d::OpType op_type, Call call);

  // The k-th send to a rank with a tag matches the k-th receive there with that tag; both complete
  // when both have been called.
  c10::intrusive_ptr<ThreadWork> send(int group_rank, int to_rank, int tag, at::Tensor tensor);
  c10::intrusive_ptr<ThreadWork> recv(int group_rank, int from_rank, int tag, at::Tensor tensor);

  // Announces that `group_rank` makes no more calls, with a reason ("has ended", "failed: ...").
  // Operations and messages that need another of its calls fail now, instead of at their timeout.
  void leave(int group_rank, const std::string& reason);

  int size() const { return group_size_; }
  std::chrono::milliseconds timeout() const { return options_.timeout; }

 private:
  friend class ThreadWork;
  using Clock = std::chrono::steady_clock;

  struct Operation {
    std::vector<std::optional<Call>> calls;  // by rank
    std::vector<c10::intrusive_ptr<ThreadWork>> works;
    int num_calls = 0;
  };
  struct Message {
    at::Tensor tensor;
    c10::intrusive_ptr<ThreadWork> work;
  };
  struct Channel {
    std::deque<Message> sends;
    std::deque<Message> recvs;
  };
  using ChannelKey = std::tuple<int, int, int>;  // from, to, tag

  c10::intrusive_ptr<ThreadWork> exchange(int group_rank,
                                          ChannelKey key,
                                          bool is_send,
                                          at::Tensor tensor);
  std::string on_rank(int group_rank) const;
  std::string missing(const ThreadWork& work);
  void finish(const Operation& operation);
  void finish_delayed(const std::stop_token& stop);
  static void fail(ThreadWork& work, const std::string& message);

  const int group_size_;
  const GroupOptions options_;

  std::mutex mutex_;
  std::map<int64_t, Operation> open_;             // by operation_idx
  std::vector<int64_t> next_operation_idx_;       // by rank
  std::vector<std::optional<std::string>> left_;  // by rank: why it makes no more calls
  std::map<ChannelKey, Channel> channels_;

  std::condition_variable_any delayed_changed_;
  std::deque<std::pair<Clock::time_point, Operation>> delayed_;
  std::jthread delayed_thread_;  // last: it uses the members above until it has stopped
};

}  // namespace weft::testing
