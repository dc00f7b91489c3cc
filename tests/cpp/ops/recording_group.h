#pragma once

// A group of one process, for tests of which collectives an operator starts.

#include "group.h"

#include <vector>

namespace weft::testing {

class DoneWork final : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

// Records whether each collective was asynchronous, and moves nothing.
class RecordingGroup final : public c10d::ProcessGroup {
 public:
  RecordingGroup(int rank, int size) : ProcessGroup(rank, size) {}

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& /*tensors*/,
                                           const c10d::AllreduceOptions& opts) override {
    return record(opts.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& /*output*/,
                                                 at::Tensor& /*input*/,
                                                 const c10d::AllgatherOptions& opts) override {
    return record(opts.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& /*output*/,
      at::Tensor& /*input*/,
      const c10d::ReduceScatterOptions& opts) override {
    return record(opts.asyncOp);
  }

  std::vector<bool> is_asynchronous;

 private:
  c10::intrusive_ptr<c10d::Work> record(bool async_op) {
    is_asynchronous.push_back(async_op);
    return c10::make_intrusive<DoneWork>();
  }
};

}  // namespace weft::testing
