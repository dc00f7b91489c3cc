#pragma once

// A call in flight, for c10d.

#include "group.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <mutex>
#include <vector>

namespace weft::collectives {

// One or several operations of one call. The group carries them out whether or not anybody waits.
class CollectiveWork final : public c10d::Work {
 public:
  // `title` for the profiler. outputs: what result() and the future give.
  CollectiveWork(std::shared_ptr<Group> group,
                 int rank,
                 c10d::OpType op_type,
                 const char* title,
                 const std::vector<at::Tensor>& inputs,
                 std::vector<at::Tensor> outputs);

  // Once for each operation, before any is submitted: adds to what happens when it is done.
  void add(const OperationPtr& operation);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return completion_->outputs; }
  void synchronize() override { wait(kNoTimeout); }
  // Errors: what the group failed with; see raise.h.
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  // Outlives the work: a call whose work is dropped still ends.
  struct Completion {
    std::mutex mutex;
    size_t num_left = 0;
    std::exception_ptr error;
    std::vector<at::Tensor> outputs;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    std::function<void()> end_of_profile;

    // REQUIRES: num_left == 0.
    void settle(c10::ivalue::Future& to_settle) const;
  };

  static void one_done(const std::shared_ptr<Completion>& completion,
                       const std::exception_ptr& operation_error);
  bool is_done() const;
  std::exception_ptr first_error() const;

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Completion> completion_;
  std::vector<OperationPtr> operations_;
};

}  // namespace weft::collectives
