#pragma once

// c10d's handle for a call in flight.

#include "completion_hooks.h"
#include "group.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

namespace weft::collectives {

// The seconds that this thread has spent in CollectiveWork::wait, which are those that the other
// ranks kept it waiting and those in which it moved and reduced data. A callback that waits inside
// of wait() does not count twice.
double seconds_waited_by_thread();

// One or several operations of one call. The group carries them out even if no thread waits.
// Exception: in a group on one host, operations submitted without `in_background`.
class CollectiveWork final : public c10d::Work {
 public:
  // title: for the profiler. outputs: the value of result() and of the future. log_id: of the call
  // in the FlightLog.
  CollectiveWork(std::shared_ptr<Group> group,
                 int rank,
                 c10d::OpType op_type,
                 const char* title,
                 const std::vector<at::Tensor>& inputs,
                 std::vector<at::Tensor> outputs,
                 std::shared_ptr<const CompletionHooks> hooks,
                 uint64_t log_id);

  // After its operations, the work takes that much time on the process's pretended link. REQUIRES:
  // none is submitted.
  void delay(std::chrono::nanoseconds time) { completion_->delay = time; }

  // Call it once for each operation, before any of them is submitted: extends the operation's
  // on_done.
  void add(const OperationPtr& operation);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return completion_->outputs; }
  void synchronize() override { wait(kNoTimeout); }
  // Errors: the failure of the group; see raise.h.
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
#if WEFT_HAS_COMPLETION_HOOKS
  uint64_t getCompletionKey() const override { return completion_->log_id; }
#endif

 private:
  // Outlives the work: a call completes even if its work is dropped.
  struct Completion {
    std::mutex mutex;
    size_t num_unfinished = 0;
    std::exception_ptr error;
    std::vector<at::Tensor> outputs;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    std::function<void()> end_of_profile;
    std::shared_ptr<const CompletionHooks> hooks;
    uint64_t log_id = 0;  // of the call in the FlightLog
    std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
    std::chrono::nanoseconds delay{0};
    // When the work completes; set with num_unfinished = 0.
    std::chrono::steady_clock::time_point end = std::chrono::steady_clock::time_point::max();

    // Waits for `end`. REQUIRES: num_unfinished == 0.
    void complete(c10::ivalue::Future& to_complete) const;
  };

  static void on_operation_done(const std::shared_ptr<Completion>& completion,
                                const std::exception_ptr& operation_error);
  bool is_done() const;
  // REQUIRES: is_done(). Not in the future if the work has failed.
  std::chrono::steady_clock::time_point end() const;
  std::exception_ptr first_error() const;

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Completion> completion_;
  std::vector<OperationPtr> operations_;
};

}  // namespace weft::collectives
