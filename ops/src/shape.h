#pragma once

// Shape functions: they check the arguments of operators and return the shapes of the results. The
// device and Meta kernels of an operator call the same function, so their errors are the same.

#include "checked_activation.h"
#include "shard_shape.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace weft::ops {

using OptionalTensor = std::optional<at::Tensor>;

// Checks that `other` has the dtype and device of x, the first tensor of the call. `name` and
// `x_name` are the arguments' names in errors.
void check_like_x(std::string_view op,
                  const at::Tensor& x,
                  const at::Tensor& other,
                  std::string_view name,
                  std::string_view x_name = "x");
// Checks that x is float32, float64, bfloat16 or float16. `name` is the argument's name in errors.
void check_floating(std::string_view op, const at::Tensor& x, std::string_view name);
// Like check_floating, for the argument named x, which must also have at least one dim.
void check_input(std::string_view op, const at::Tensor& x);

// Checks act(x w1ᵀ + b1) [* (x w3ᵀ + b3)] w2ᵀ + b2; returns the shape of the output.
c10::SymDimVector column_row_mlp_shape(const at::Tensor& x,
                                       const at::Tensor& w1,
                                       const at::Tensor& w2,
                                       const OptionalTensor& w3,
                                       const OptionalTensor& b1,
                                       const OptionalTensor& b2,
                                       const OptionalTensor& b3,
                                       std::string_view activation);

// The dim along which x and the result of a call are sharded over the group.
struct ShardedDim {
  std::int64_t dim;       // counted from 0
  c10::SymInt full_size;  // of all shards together
};

// Checks the sequence arguments of column_row_mlp: x is this rank's shard along `sequence_dim`,
// which must not be the last dim. Returns nullopt without `sequence_dim`; `sequence_size` must then
// be absent, too.
std::optional<ShardedDim> mlp_sequence_dim(const at::Tensor& x,
                                           const std::optional<std::int64_t>& sequence_dim,
                                           const std::optional<c10::SymInt>& sequence_size,
                                           const GroupRank& group_rank);

// Checks x weightᵀ + bias for the operator `op`; returns the shape of the output.
c10::SymDimVector linear_shape(std::string_view op,
                               const at::Tensor& x,
                               const at::Tensor& weight,
                               const OptionalTensor& bias);

// Checks gather(x) weightᵀ + bias, where x is this rank's shard along `gather_dim`, which must not
// be the last dim; returns the shape of the output.
c10::SymDimVector all_gather_linear_shape(const at::Tensor& x,
                                          const at::Tensor& weight,
                                          const OptionalTensor& bias,
                                          std::int64_t gather_dim,
                                          const std::optional<c10::SymInt>& dim_size,
                                          const GroupRank& group_rank);

// Checks scatter(x weightᵀ) + bias, which is sharded along `scatter_dim`, not the last dim. Returns
// the shape of this rank's shard.
c10::SymDimVector linear_reduce_scatter_shape(const at::Tensor& x,
                                              const at::Tensor& weight,
                                              const OptionalTensor& bias,
                                              std::int64_t scatter_dim,
                                              const GroupRank& group_rank);

// Checks x gather(weight)ᵀ + gather(bias), where weight and bias are this rank's shards of the
// `out_features` rows; returns the shape of the output, [..., out_features].
c10::SymDimVector sharded_linear_shape(const at::Tensor& x,
                                       const at::Tensor& weight,
                                       const OptionalTensor& bias,
                                       const std::optional<c10::SymInt>& out_features,
                                       const GroupRank& group_rank);

// Checks the arguments of the cross-entropy operator `op`, with this rank's logits [..., v] and the
// targets [...]; returns the shape of the loss: [...] for reduction "none", else [].
c10::SymDimVector cross_entropy_shape(std::string_view op,
                                      const at::Tensor& logits,
                                      const at::Tensor& target,
                                      std::int64_t vocab_start,
                                      double label_smoothing,
                                      std::string_view reduction);

// Checks that this rank's `num_entries` classes from vocab_start on are below `vocab_size`, if it
// is set.
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

// Checks ids [...], weight [rows, d] and vocab_start; returns the shape of the output, [..., d].
c10::SymDimVector vocab_embedding_shape(const at::Tensor& ids,
                                        const at::Tensor& weight,
                                        std::int64_t vocab_start);

}  // namespace weft::ops
