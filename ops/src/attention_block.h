#pragma once

// Attention of queries to one block of keys and values, with torch's kernels, and the combination
// of the blocks' results. All functions work below autograd.
//
// Shapes: query, out and their gradients [batch, heads, tokens, head_dim]; key, value and their
// gradients [batch, kv_heads, tokens, head_dim], where kv_heads divides heads; lse, the logarithms
// of the sums of exponentials, [batch, heads, tokens]. A block's results and gradients are combined
// in the dtype of lse: float64 for float64, otherwise float32.

#include "attention_kernels.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace weft::ops {

// Returns uninitialized results for `query`. In memory, the dim of heads is behind that of tokens,
// as a linear layer needs it.
AttentionResult empty_attention(const at::Tensor& query);

// Returns the attention of `query` to one block. REQUIRES: query, key and value are not empty.
AttentionResult attend(const at::Tensor& query,
                       const at::Tensor& key,
                       const at::Tensor& value,
                       const AttentionOptions& options);

// Tokens [begin, begin + size) of all rows of the batch, or of one row.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t size = 0;
  std::optional<std::int64_t> row = {};

  // x [batch, heads, tokens, ...]; returns a view.
  at::Tensor of(const at::Tensor& x) const {
    const auto tokens = x.narrow(2, begin, size);
    return row.has_value() ? tokens.narrow(0, *row, 1) : tokens;
  }
};

// The attention to several blocks, computed from their results (Liu et al., "Ring Attention", 2023;
// Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
class AttentionSum {
 public:
  // `query` has all queries.
  explicit AttentionSum(const at::Tensor& query)
      : num_rows_(query.size(0)), num_queries_(query.size(2)) {}

  // Adds a block's result for some queries.
  void add(AttentionResult block, const TokenRange& queries);
  bool is_empty() const { return !out_.defined(); }
  // Returns the attention, with `out` of this dtype. REQUIRES: each query has a result;
  // !is_empty().
  AttentionResult take(at::ScalarType dtype);

 private:
  std::int64_t num_rows_;
  std::int64_t num_queries_;
  at::Tensor out_;  // in the dtype of lse_
  at::Tensor lse_;
};

// Adds the gradients of the attention to one block to `gradients`, which have the dtype of lse.
// `attention` is the result over all blocks, and grad_out its gradient.
void add_gradients(const AttentionGradients& gradients,
                   const at::Tensor& grad_out,
                   const at::Tensor& query,
                   const at::Tensor& key,
                   const at::Tensor& value,
                   const AttentionResult& attention,
                   const AttentionOptions& options);

}  // namespace weft::ops
