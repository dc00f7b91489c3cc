#pragma once

// The local half of a cross-entropy over a vocabulary that is cut over the group: what each rank
// finds out about its own logits, how that becomes the loss, and the gradient of the logits. All on
// matrices [tokens, entries] and below autograd, in float32 (float64 for float64 logits); nothing
// here communicates. The passes over the logits are kernels/'s.
//
// The log-sum-exp over all parts is that of (m, s) per part, m being its largest logit and s the
// sum of exp(logit - m): Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

#include "shard_shape.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace weft::ops {

struct LocalLossOptions {
  std::int64_t vocab_start;   // the class of this rank's first entry
  std::int64_t num_classes;   // of all ranks
  std::int64_t ignore_index;  // a target without loss and gradient
  double label_smoothing;
};

// How many classes there are: as many on every rank where that is not told.
inline std::int64_t classes_of(std::int64_t num_entries,
                               std::optional<std::int64_t> vocab_size,
                               const GroupPlace& place) {
  return vocab_size.value_or(num_entries * place.num_ranks);
}

// The dtype in which losses are computed.
at::ScalarType loss_dtype(const at::Tensor& logits);

// How many tokens to work on at a time, so that their logits take `num_bytes` at most; 1 at least.
std::int64_t tokens_per_chunk(std::int64_t num_entries,
                              at::ScalarType dtype,
                              std::int64_t num_bytes);

// [tokens, 4] of loss_dtype: largest logit, sum of exp(logit - largest), logit of the target (0
// where another rank has it), sum of the logits (0 unless it is needed).
// logits [tokens, v], target [tokens].
at::Tensor local_statistics(const at::Tensor& logits,
                            const at::Tensor& target,
                            const LocalLossOptions& options);

struct TokenLosses {
  at::Tensor losses;  // [tokens]
  // [2, tokens]: the largest of all logits, and the log of the sum of exp(logit - largest). Kept
  // apart: their sum would lose the digits of the second.
  at::Tensor normalizers;
};

// statistics [ranks, tokens, 4].
TokenLosses combine_statistics(const at::Tensor& statistics,
                               const at::Tensor& target,
                               const LocalLossOptions& options);

// Writes the gradient of logits to `gradient`, which is like them and contiguous, and may be them;
// grad [tokens] is that of the losses.
void write_gradient(const at::Tensor& gradient,
                    const at::Tensor& grad,
                    const at::Tensor& logits,
                    const at::Tensor& target,
                    const at::Tensor& normalizers,
                    const LocalLossOptions& options);

}  // namespace weft::ops
