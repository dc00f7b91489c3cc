#pragma once

// The shape functions: each checks the arguments of one operator and returns the size of its
// result. Device and Meta kernels call the same function, so their errors are the same.

#include "checked_activation.h"
#include "shard_shape.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace weft::ops {

using OptionalTensor = std::optional<at::Tensor>;

// Checks that `other` has the dtype and device of x, the first tensor of the call.
void check_like_x(std::string_view op,
                  const at::Tensor& x,
                  const at::Tensor& other,
                  std::string_view name);
// Checks that x has a supported floating dtype.
void check_floating(std::string_view op, const at::Tensor& x, std::string_view name);
// Checks x [..., features], of such a dtype.
void check_input(std::string_view op, const at::Tensor& x);

// Checks act(x w1ᵀ + b1) [* (x w3ᵀ + b3)] w2ᵀ + b2; returns the size of the output.
c10::SymDimVector column_row_mlp_shape(const at::Tensor& x,
                                       const at::Tensor& w1,
                                       const at::Tensor& w2,
                                       const OptionalTensor& w3,
                                       const OptionalTensor& b1,
                                       const OptionalTensor& b2,
                                       const OptionalTensor& b3,
                                       std::string_view activation);

// The dim along which x and the result of a call are sharded over the group, and its full size.
struct Sequence {
  std::int64_t dim;  // counted from 0
  c10::SymInt size;  // of all shards together
};

// Returns the sequence of a column_row_mlp whose x is a shard along `sequence_dim`, which must not
// be the last dim; nothing without a `sequence_dim`.
std::optional<Sequence> mlp_sequence(const at::Tensor& x,
                                     const std::optional<std::int64_t>& sequence_dim,
                                     const std::optional<c10::SymInt>& sequence_size,
                                     const GroupRank& group_rank);

// Checks x weightᵀ + bias for the operator `op`; returns the size of the output.
c10::SymDimVector linear_shape(std::string_view op,
                               const at::Tensor& x,
                               const at::Tensor& weight,
                               const OptionalTensor& bias);

// Checks gather(x) weightᵀ + bias, where x is a shard along `gather_dim`, which must not be the
// last dim; returns the size of the output.
c10::SymDimVector all_gather_linear_shape(const at::Tensor& x,
                                          const at::Tensor& weight,
                                          const OptionalTensor& bias,
                                          std::int64_t gather_dim,
                                          const std::optional<c10::SymInt>& dim_size,
                                          const GroupRank& group_rank);

// Checks x weightᵀ + bias, of which a shard along `scatter_dim` is returned, which must not be the
// last dim; returns the size of the output.
c10::SymDimVector linear_reduce_scatter_shape(const at::Tensor& x,
                                              const at::Tensor& weight,
                                              const OptionalTensor& bias,
                                              std::int64_t scatter_dim,
                                              const GroupRank& group_rank);

// Checks x weightᵀ + bias, where weight and bias are this rank's shard of `out_features` rows;
// returns the size of the output, which has all of them.
c10::SymDimVector sharded_linear_shape(const at::Tensor& x,
                                       const at::Tensor& weight,
                                       const OptionalTensor& bias,
                                       const std::optional<c10::SymInt>& out_features,
                                       const GroupRank& group_rank);

// Checks this rank's logits [..., v] and targets [...] for the operator `op`, and that `reduction`
// is one of "none", "mean", "sum"; returns the size of the output.
c10::SymDimVector cross_entropy_shape(std::string_view op,
                                      const at::Tensor& logits,
                                      const at::Tensor& target,
                                      std::int64_t vocab_start,
                                      double label_smoothing,
                                      std::string_view reduction);

// Checks that this rank's `num_entries` classes from vocab_start on are below `vocab_size`, if set.
void check_classes(std::string_view op,
                   std::int64_t vocab_start,
                   const c10::SymInt& num_entries,
                   std::optional<std::int64_t> vocab_size);

// Like cross_entropy_shape, for x [..., d] and this rank's rows of the output matrix, [v, d].
c10::SymDimVector linear_cross_entropy_shape(const at::Tensor& x,
                                             const at::Tensor& weight,
                                             const at::Tensor& target,
                                             std::int64_t vocab_start,
                                             double label_smoothing,
                                             std::string_view reduction);

// Checks ids, table and vocab_start (>= 0); returns the size of the output.
c10::SymDimVector vocab_embedding_shape(const at::Tensor& ids,
                                        const at::Tensor& weight,
                                        std::int64_t vocab_start);

}  // namespace weft::ops
