#pragma once

#include "all_reduce_from_writer.h"
#include "completion_hooks.h"
#include "flight_log.h"
#include "group.h"
#include "messages.h"
#include "sparse_sum.h"
#include "tensors.h"

#include <weft/ops/backend.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>
#include <vector>

namespace weft::collectives {

// c10d's collectives over a Group. Calls for which c10d has two names are overridden under the
// older name: torch 2.11 has only that one, and newer versions forward to it.
class WeftBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  WeftBackend(const c10::intrusive_ptr<c10d::Store>& store,
              int rank,
              int size,
              c10::intrusive_ptr<ops::BackendOptions> options);
  ~WeftBackend() override;

  static constexpr const char* kName = "weft";

  const std::string getBackendName() const override { return kName; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  uint64_t getSequenceNumberForGroup() override { return num_collectives_; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override;
  c10d::ErrorType getError() override;
#if WEFT_HAS_COMPLETION_HOOKS
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) override {
    completion_hooks_->add(hook_id, std::move(hook));
  }
  void unregisterCompletionHook(int64_t hook_id) override { completion_hooks_->remove(hook_id); }
#endif
  // Fails the group on every rank with a CollectiveMismatchError whose message is `text`.
  void fail_with_mismatch(const std::string& text) { group_->fail_with_mismatch(text); }
  void abort() override;
  void shutdown() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  // The only tensor may be a sparse COO tensor.
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return allreduce(tensors, opts);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs,
                    Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output,
                          at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs,
                              Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs,
                                          Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs,
                 Tensors& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs,
                  std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs,
                         std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output,
                               at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs,
                                          Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output,
                        at::Tensor& input,
                        std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // See all_reduce_from_writer.h.
  WorkPtr allreduce_from_writer(at::Tensor& result, const WriteInput& write_input);

 private:
  // An operation and the tensors it works on.
  struct Step {
    OperationPtr operation;
    std::shared_ptr<TensorPack> pack;
    SignatureHeader header{};  // of a collective
    std::shared_ptr<SparseSum> sparse_sum{};
  };
  struct Call {
    c10d::OpType op_type;
    const char* title;  // for the profiler
    std::chrono::milliseconds timeout;
    bool in_background;
    // The input of the only step was written to memory of acquire_scratch().
    bool is_in_scratch = false;
  };

  // A tensor's position in a coalesced call. All ranks pass the same number of tensors in the same
  // order.
  struct CoalescedPosition {
    size_t index = 0;
    size_t num_tensors = 1;
  };

  Step step(CollectiveCall call,
            std::shared_ptr<TensorPack> pack,
            CoalescedPosition position = {0, 1}) const {
    call.header.position = static_cast<int32_t>(position.index);
    call.header.num_coalesced = static_cast<int32_t>(position.num_tensors);
    const SignatureHeader header = call.header;
    return {group_->make(std::move(call)), std::move(pack), header};
  }
  WorkPtr start(const Call& call,
                const std::vector<Step>& steps,
                const Tensors& inputs,
                Tensors outputs);
  // REQUIRES: options_->slow_network.
  std::chrono::nanoseconds time_on_slow_network(const Call& call,
                                                const std::vector<Step>& steps,
                                                const Tensors& inputs,
                                                const Tensors& outputs) const;
  Step all_reduce_step(const at::Tensor& tensor,
                       const c10d::ReduceOp& op,
                       CoalescedPosition position = {0, 1}) const;
  WorkPtr sparse_all_reduce(const at::Tensor& tensor, const c10d::AllreduceOptions& opts);
  Step all_gather_step(const at::Tensor& input,
                       const Tensors& outputs,
                       CoalescedPosition position = {0, 1}) const;
  Step all_gather_step(const at::Tensor& input,
                       const at::Tensor& output,
                       CoalescedPosition position = {0, 1}) const;
  Step reduce_scatter_step(const at::Tensor& output,
                           const at::Tensor& input,
                           const c10d::ReduceOp& op,
                           CoalescedPosition position = {0, 1}) const;
  // The entry of the log for a call with these steps.
  FlightLog::Call logged_call(const std::vector<Step>& steps, uint64_t sequence) const;
  WorkPtr message(Message::Direction direction, Tensors& tensors, int peer, int tag);
  // Returns the list with a tensor per rank on the root, an empty list on other ranks.
  Tensors list_on_root(std::string_view op, const std::vector<Tensors>& lists, int root) const;
  int checked_root(std::string_view op, int64_t root) const;
  void check_peer(std::string_view op, int peer) const;

  const c10::intrusive_ptr<ops::BackendOptions> options_;
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<const FlightLog::GroupFacts> group_facts_;
  const std::shared_ptr<CompletionHooks> completion_hooks_ = std::make_shared<CompletionHooks>();
  std::atomic<uint64_t> num_collectives_{0};
};

}  // namespace weft::collectives
