#pragma once

// Collectives on the parts of a dim of a group's ranks: see shard_shape.h for how it is cut.
// Everything here works below autograd and gives memory of its own, contiguous. A null group is one
// rank. Nothing is sent where no rank has an element.

#include "group.h"
#include "shard_shape.h"

namespace weft::ops {

GroupPlace place_in(const ProcessGroupPtr& group);
// The same by the group's name. Errors: those of resolve_group.
GroupPlace place_in(std::string_view op, std::string_view group_name);

// A tensor that a collective is about to give. Move-only; what the collective reads stays alive
// with it.
class PendingTensor {
 public:
  explicit PendingTensor(at::Tensor result);
  // The first `size` entries of `result`, as `dim`, once `work` is done.
  PendingTensor(PendingCollective work, at::Tensor result, std::int64_t size, std::int64_t dim);

  // Waits (for CUDA: makes the current stream wait). Call it once.
  at::Tensor get();

 private:
  PendingCollective work_;
  at::Tensor result_;
  std::int64_t size_;
  std::int64_t dim_;
};

// All parts of `dim`, `dim_size` long together, of which x is this rank's.
at::Tensor all_gather(std::string_view op,
                      const at::Tensor& x,
                      std::int64_t dim,
                      std::int64_t dim_size,
                      const ProcessGroupPtr& group);
PendingTensor start_all_gather(std::string_view op,
                               const at::Tensor& x,
                               std::int64_t dim,
                               std::int64_t dim_size,
                               const ProcessGroupPtr& group);

// x [rows, ...] of all ranks, each with zeros up to `num_rows`: [ranks * num_rows, ...], not to be
// read before the second was waited for. Errors say `what`. REQUIRES: a group.
std::pair<at::Tensor, PendingCollective> start_gather_rows(std::string_view op,
                                                           std::string_view what,
                                                           const at::Tensor& x,
                                                           std::int64_t num_rows,
                                                           const ProcessGroupPtr& group);

// The sum of `whole` [ranks * rows, ...] over the group, this rank's rows of it, into `result`
// [rows, ...]; both contiguous, with elements. REQUIRES: a group.
PendingCollective start_scatter_rows(std::string_view op,
                                     std::string_view what,
                                     const at::Tensor& whole,
                                     const at::Tensor& result,
                                     const ProcessGroupPtr& group);

// This rank's part along `dim` of the sum of x over the group.
at::Tensor reduce_scatter(std::string_view op,
                          const at::Tensor& x,
                          std::int64_t dim,
                          const ProcessGroupPtr& group);
PendingTensor start_reduce_scatter(std::string_view op,
                                   const at::Tensor& x,
                                   std::int64_t dim,
                                   const ProcessGroupPtr& group);

// Sends the contiguous `tensor` of rank `root` into that of all others; nothing where it is empty.
PendingCollective start_broadcast(std::string_view op,
                                  const at::Tensor& tensor,
                                  int root,
                                  const ProcessGroupPtr& group);

// Sums the contiguous `tensor` into that of rank `root`; what the others' hold then is undefined.
PendingCollective start_reduce(std::string_view op,
                               const at::Tensor& tensor,
                               int root,
                               const ProcessGroupPtr& group);

// Part r of x along `split_dim` goes to rank r; what comes from the ranks is put together along
// `cat_dim`, `cat_size` long.
at::Tensor all_to_all(std::string_view op,
                      const at::Tensor& x,
                      std::int64_t split_dim,
                      std::int64_t cat_dim,
                      std::int64_t cat_size,
                      const ProcessGroupPtr& group);

}  // namespace weft::ops
