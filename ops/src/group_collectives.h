#pragma once

// Collectives on tensors that are sharded over a group as in shard_shape.h. All functions work
// below autograd. Those that take a `dim` return new contiguous tensors, and accept a null
// group as a group of one. Nothing is sent if no rank has an element. `overlaps`: see
// PendingCollective.

#include "group.h"
#include "shard_shape.h"

#include <optional>
#include <vector>

namespace weft::ops {

// Returns this rank and the number of ranks of `group`; a null group is a group of one.
GroupRank rank_in(const ProcessGroupPtr& group);
// Like rank_in(group), for the group named `group_name`. Errors: those of resolve_group.
GroupRank rank_in(std::string_view op, std::string_view group_name);

// The result of a collective in flight, which keeps the inputs alive. Move-only.
class PendingTensor {
 public:
  // A result that is complete.
  explicit PendingTensor(at::Tensor result);
  // get() returns the first `size` entries of the first dim of `rows`, and moves that dim to `dim`.
  static PendingTensor of_rows(PendingCollective work,
                               at::Tensor rows,
                               std::int64_t size,
                               std::int64_t dim);
  // get() returns the concatenation along `dim` of shards[0], shards[1], ...
  static PendingTensor of_stacked_shards(PendingCollective work,
                                         at::Tensor shards,
                                         std::int64_t dim);

  // Waits (CUDA: makes the current stream wait) and returns the tensor, contiguous. Call it once.
  at::Tensor get();

 private:
  PendingCollective work_;
  at::Tensor result_;
  std::optional<std::int64_t> flattened_dim_;  // to be flattened with the dim after it
};

// Returns the full tensor along `dim`, of size `dim_size`, of which x is this rank's shard.
at::Tensor all_gather(std::string_view op,
                      const at::Tensor& x,
                      std::int64_t dim,
                      std::int64_t dim_size,
                      const ProcessGroupPtr& group);
PendingTensor start_all_gather(std::string_view op,
                               const at::Tensor& x,
                               std::int64_t dim,
                               std::int64_t dim_size,
                               const ProcessGroupPtr& group,
                               bool overlaps);

// Starts to gather x [rows, ...] of all ranks, each padded with zeros to `num_rows`, into
// [ranks * num_rows, ...]. Wait for the second result before reading the first. `what` names the
// collective in errors. REQUIRES: group is not null.
std::pair<at::Tensor, PendingCollective> start_gather_rows(std::string_view op,
                                                           std::string_view what,
                                                           const at::Tensor& x,
                                                           std::int64_t num_rows,
                                                           const ProcessGroupPtr& group,
                                                           bool overlaps);

// Starts to reduce-scatter `full` [ranks * rows, ...] into `result` [rows, ...]. REQUIRES: group is
// not null; both tensors are contiguous and not empty.
PendingCollective start_scatter_rows(std::string_view op,
                                     std::string_view what,
                                     const at::Tensor& full,
                                     const at::Tensor& result,
                                     const ProcessGroupPtr& group,
                                     bool overlaps);

// Returns this rank's shard along `dim` of the sum of x over the group.
at::Tensor reduce_scatter(std::string_view op,
                          const at::Tensor& x,
                          std::int64_t dim,
                          const ProcessGroupPtr& group);
PendingTensor start_reduce_scatter(std::string_view op,
                                   const at::Tensor& x,
                                   std::int64_t dim,
                                   const ProcessGroupPtr& group,
                                   bool overlaps);

// Starts to broadcast the contiguous `tensor` of rank `root` into `tensor` of the other ranks. Does
// nothing if the tensor is empty. REQUIRES: group is not null.
PendingCollective start_broadcast(std::string_view op,
                                  const at::Tensor& tensor,
                                  int root,
                                  const ProcessGroupPtr& group,
                                  bool overlaps);

// Starts to sum the contiguous `tensor` over the group into `tensor` of rank `root`; on the other
// ranks, the contents of the tensor are then undefined. Does nothing if the tensor is empty.
// REQUIRES: group is not null.
PendingCollective start_reduce(std::string_view op,
                               const at::Tensor& tensor,
                               int root,
                               const ProcessGroupPtr& group,
                               bool overlaps);

// Two messages in flight, one to a rank and one from a rank. Move-only.
struct PendingExchange {
  PendingCollective receiving;
  PendingCollective sending;

  void wait() {
    receiving.wait();
    sending.wait();
  }
};

// The messages of an exchange; for tags, see pipeline/wire.h. REQUIRES: the tensors are contiguous.
struct ExchangedTensors {
  at::Tensor sent;
  int destination = 0;
  at::Tensor received;
  int source = 0;
  int tag = 0;
};

// Starts to send one tensor and to receive another. All ranks start their exchanges in the same
// order, also those of empty tensors. REQUIRES: group is not null.
PendingExchange start_exchange(std::string_view op,
                               const ExchangedTensors& tensors,
                               const ProcessGroupPtr& group);

// Sends shard r of x along `split_dim` to rank r; concatenates the received tensors along
// `cat_dim`, of full size `cat_size`.
at::Tensor all_to_all(std::string_view op,
                      const at::Tensor& x,
                      std::int64_t split_dim,
                      std::int64_t cat_dim,
                      std::int64_t cat_size,
                      const ProcessGroupPtr& group);

// Starts to send `sent[r]` of the rows [rows, features] to rank r, in order, and to receive the
// `received[r]` rows of each rank r, in order. All ranks call it, also those without rows, unless
// there are no features. Wait for the second result before reading the first. For a null group,
// the first result are `rows`.
std::pair<at::Tensor, PendingCollective> start_to_exchange_rows(
    std::string_view op,
    at::Tensor rows,
    const std::vector<std::int64_t>& sent,
    const std::vector<std::int64_t>& received,
    const ProcessGroupPtr& group,
    bool overlaps);
// Like start_to_exchange_rows, and waits.
at::Tensor exchange_rows(std::string_view op,
                         at::Tensor rows,
                         const std::vector<std::int64_t>& sent,
                         const std::vector<std::int64_t>& received,
                         const ProcessGroupPtr& group);

}  // namespace weft::ops
