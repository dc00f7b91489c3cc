// Runs ranks as threads, for GoogleTests of distributed code without processes.
//
//   run_ranks(2, [](RankContext& ctx) {
//     at::Tensor x = at::ones({4});
//     std::vector<at::Tensor> tensors{x};
//     c10d::resolve_process_group(ctx.group_name)->allreduce(tensors)->wait();
//     EXPECT_EQ(x[0].item<float>(), 2);
//     EXPECT_EQ(ctx.backend->count(Collective::kAllReduce).num_calls, 1);
//   });
#pragma once

#include "thread_group.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace weft::testing {

struct CallCount {
  int64_t num_calls = 0;
  int64_t num_bytes = 0;  // of this rank's inputs (for recv, of the tensors received)

  bool operator==(const CallCount&) const = default;
};

// One rank's c10d backend, for contiguous CPU tensors. all_reduce and reduce_scatter support SUM,
// AVG (floating point only), PRODUCT, MIN, MAX; the other collectives any dtype. Every list holds
// one tensor. Calls that differ between ranks fail on all of them; a tensor that is not supported
// raises c10::Error at once.
class ThreadBackend final : public c10d::Backend {
 public:
  ThreadBackend(std::shared_ptr<ThreadGroup> group, int group_rank);

  const std::string getBackendName() const override { return "threads"; }

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& opts = c10d::AllreduceOptions()) override;
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& opts = c10d::BroadcastOptions()) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& output_lists,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) override;
  // NOTE: newer c10d calls this all_gather_single, and _reduce_scatter_base below
  // reduce_scatter_single; there each name forwards to the one that is overridden.
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& input_lists,
      const c10d::ReduceScatterOptions& opts = c10d::ReduceScatterOptions()) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& opts = c10d::ReduceScatterOptions()) override;
  c10::intrusive_ptr<c10d::Work> barrier(
      const c10d::BarrierOptions& opts = c10d::BarrierOptions()) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors,
                                      int to_rank,
                                      int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors,
                                      int from_rank,
                                      int tag) override;

  // This rank's calls since the start or the last `reset_counts`.
  CallCount count(Collective collective) const;
  int64_t num_calls() const;  // of any kind
  void reset_counts();

  // Returns the titles of works that were not waited for.
  std::vector<std::string> unwaited() const;

 private:
  c10::intrusive_ptr<c10d::Work> issue(c10d::OpType op_type, Call call);
  c10::intrusive_ptr<c10d::Work> counted(Collective collective,
                                         int64_t num_bytes,
                                         c10::intrusive_ptr<ThreadWork> work);
  void check(Collective collective, const at::Tensor& tensor) const;
  void check_count(Collective collective, size_t num_tensors, int expected) const;
  void check_reduction(Collective collective,
                       const at::Tensor& tensor,
                       c10d::ReduceOp::RedOpType reduce_op) const;

  const std::shared_ptr<ThreadGroup> group_;
  mutable std::mutex mutex_;  // backward may issue from another thread than forward
  std::array<CallCount, 7> counts_;
  std::vector<c10::intrusive_ptr<ThreadWork>> issued_;
};

struct RankContext {
  int group_rank;
  int group_size;
  std::string group_name;  // resolves, on this rank's thread, to `process_group`
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  c10::intrusive_ptr<ThreadBackend> backend;
};

struct RankOptions {
  GroupOptions group;
  std::string group_name = "tensor_parallel";
  // Whether a rank fails if it ends without having waited for one of its collectives.
  bool require_waits = true;
};

// Runs `body` on `num_ranks` threads, each a rank of one group that c10d resolves by name, with
// c10d's thread isolation mode on. Returns when all have ended. Throws std::runtime_error that
// names the rank that failed first, with its message; ranks that wait for a rank that has ended or
// failed fail at once. GoogleTest's EXPECT_ macros work in the body; ASSERT_ ends the body of its
// own rank only. Threads that a body starts do not belong to its rank.
void run_ranks(int num_ranks,
               const std::function<void(RankContext&)>& body,
               const RankOptions& options = {});

}  // namespace weft::testing
