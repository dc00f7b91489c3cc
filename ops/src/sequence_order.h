#pragma once

// The order in which the tokens of a sequence are sharded over a context-parallel group of n ranks.
//
// The sequence is divided into chunks like torch.chunk. In the order "contiguous" there are n
// chunks, and rank r has chunk r. In the order "head_tail" there are 2n, and rank r has chunk r,
// its head, and behind it chunk 2n - 1 - r, its tail: with a causal mask, all ranks then have
// nearly the same number of pairs of a query and a key to compute (the zig-zag order of
// Megatron-LM's context parallelism; Brandon et al., "Striped Attention", 2023, interleave single
// tokens instead).

#include "shard_shape.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace weft::ops {

enum class SequenceOrder { kContiguous, kHeadTail };

// Returns the order of this name. Errors: ValueError for other names.
SequenceOrder checked_order(std::string_view op, std::string_view name);

// The number of tokens of a rank's chunks. In the order "contiguous" the tail is empty.
struct ShardChunks {
  c10::SymInt head;
  c10::SymInt tail;

  c10::SymInt size() const { return head + tail; }
};

ShardChunks shard_chunks(SequenceOrder order,
                         const c10::SymInt& sequence_size,
                         const GroupRank& group_rank);

// Returns the number of tokens of the full sequence, of which `x` has this rank's shard in dim
// `dim`: `sequence_size`, by default x's size times the number of ranks. `name` is the argument's
// name in errors. Errors: ValueError if x's size is not that of this rank's shard.
c10::SymInt checked_sequence_size(std::string_view op,
                                  SequenceOrder order,
                                  const at::Tensor& x,
                                  std::int64_t dim,
                                  const std::optional<c10::SymInt>& sequence_size,
                                  const GroupRank& group_rank,
                                  std::string_view name);

}  // namespace weft::ops
