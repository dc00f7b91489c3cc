#pragma once

// The local computations of a cross-entropy over a sharded vocabulary: each rank's statistics of
// its own logits, the loss from the statistics of all ranks, and the gradient of the logits. All
// functions work on matrices [tokens, v], where v is the number of this rank's classes, below
// autograd, in float32 (float64 for float64 logits) and without communication. kernels/ has the
// passes over the logits.
//
// Each rank has m, its largest logit, and s, the sum of exp(logit - m) over its shard. With M, the
// largest m, the log-sum-exp over all ranks is M + log(sum of s exp(m - M)): Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018.

#include "shard_shape.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace weft::ops {

struct LocalLossOptions {
  std::int64_t vocab_start;   // this rank's first class
  std::int64_t num_classes;   // of all ranks together
  std::int64_t ignore_index;  // targets of this value have no loss or gradient
  double label_smoothing;
};

// Returns the number of classes of all ranks together. Without `vocab_size`, each rank has
// `num_entries` classes.
inline std::int64_t classes_of(std::int64_t num_entries,
                               std::optional<std::int64_t> vocab_size,
                               const GroupRank& group_rank) {
  return vocab_size.value_or(num_entries * group_rank.num_ranks);
}

// The dtype in which losses are computed.
at::ScalarType loss_dtype(const at::Tensor& logits);

// Returns the largest number of tokens, but at least 1, whose logits [tokens, num_entries] take at
// most `num_bytes`.
std::int64_t tokens_per_chunk(std::int64_t num_entries,
                              at::ScalarType dtype,
                              std::int64_t num_bytes);

// Returns the chunk size in tokens, at least 1, of a loss whose logits are the product of hidden
// states and a weight of `weight_sizes`, [num_entries, num_features], all of `dtype`. The backward
// adds a product of the weight's size to the weight's gradient for each chunk.
//
// CPU: 32 MiB of logits; smaller chunks have slower products.
//
// CUDA: more if fewer than 2048 tokens fit into 32 MiB: the logits of 2048 tokens, or of
// num_features tokens if that is fewer. A chunk's product with t tokens computes 2 t operations for
// each entry of the weight's gradient, and reads and writes the entry's 4 bytes: on an H100 (700
// TFLOP/s in bfloat16, 3 TB/s), computing takes as long as the memory traffic from 933 tokens on;
// 2048 tokens are about twice that. Beyond 32 MiB, the logits have at most as many bytes as the
// weight. In bfloat16 and float16, the logits then do not raise the peak: at the end, the sum is
// converted from float32 to a tensor with as many bytes as the weight.
std::int64_t tokens_per_product_chunk(const c10::Device& device,
                                      at::IntArrayRef weight_sizes,
                                      at::ScalarType dtype);

// logits [tokens, v], target [tokens]. Returns [tokens, 4] of loss_dtype: largest logit, sum of
// exp(logit - largest), logit of the target (0 if another rank has it), sum of the logits (0
// without label smoothing).
at::Tensor local_statistics(const at::Tensor& logits,
                            const at::Tensor& target,
                            const LocalLossOptions& options);

struct TokenLosses {
  at::Tensor losses;  // [tokens]
  // [2, tokens]: the largest of all logits, and the log of the sum of exp(logit - largest). Kept
  // apart, because rounding of their sum would lose digits of the second.
  at::Tensor normalizers;
};

// Computes the losses from the statistics of all ranks, [ranks, tokens, 4].
TokenLosses combine_statistics(const at::Tensor& statistics,
                               const at::Tensor& target,
                               const LocalLossOptions& options);

// Writes the gradient of logits to `grad_logits`, a contiguous tensor like logits, or logits
// itself. grad_losses: [tokens].
void write_gradient(const at::Tensor& grad_logits,
                    const at::Tensor& grad_losses,
                    const at::Tensor& logits,
                    const at::Tensor& target,
                    const at::Tensor& normalizers,
                    const LocalLossOptions& options);

}  // namespace weft::ops
