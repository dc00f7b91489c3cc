#pragma once

// Attention over a sequence that is sharded over a group, below autograd: see ring_attention.cpp.

#include "attention_block.h"
#include "attention_mask.h"
#include "shard_shape.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>

namespace weft::ops {

constexpr std::string_view kRingAttention = "weft::ring_attention";

// The options of a call, as the schema has them.
struct RingOptions {
  std::string group_name;
  SequenceMaskArguments mask;
  std::optional<double> scale;
  std::optional<c10::SymInt> sequence_size;
  std::string order;
};

// Checks the arguments of a call; returns the number of tokens of the full sequence.
c10::SymInt checked_ring_arguments(const at::Tensor& query,
                                   const at::Tensor& key,
                                   const at::Tensor& value,
                                   const RingOptions& options,
                                   const GroupRank& group_rank);

// Returns the attention of this rank's queries to the keys of all ranks.
AttentionResult ring_attention_forward(const at::Tensor& query,
                                       const at::Tensor& key,
                                       const at::Tensor& value,
                                       const RingOptions& options);

// Returns the gradients of this rank's query, key and value, contiguous. `attention` is the result
// of the forward, and grad_out the gradient of attention.out.
AttentionGradients ring_attention_gradients(const at::Tensor& grad_out,
                                            const at::Tensor& query,
                                            const at::Tensor& key,
                                            const at::Tensor& value,
                                            const AttentionResult& attention,
                                            const RingOptions& options);

}  // namespace weft::ops
