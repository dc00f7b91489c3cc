#include "sequence_order.h"

#include <c10/util/Exception.h>

namespace weft::ops {

namespace {

std::string_view name_of(SequenceOrder order) {
  return order == SequenceOrder::kHeadTail ? "head_tail" : "contiguous";
}

}  // namespace

SequenceOrder checked_order(std::string_view op, std::string_view name) {
  TORCH_CHECK_VALUE(
      name == name_of(SequenceOrder::kHeadTail) || name == name_of(SequenceOrder::kContiguous),
      op,
      ": got order '",
      name,
      "'; pass 'head_tail' or 'contiguous', the order in which the sequence is "
      "sharded.");
  return name == name_of(SequenceOrder::kHeadTail) ? SequenceOrder::kHeadTail
                                                   : SequenceOrder::kContiguous;
}

ShardChunks shard_chunks(SequenceOrder order,
                         const c10::SymInt& sequence_size,
                         const GroupRank& group_rank) {
  const auto& [num_ranks, rank] = group_rank;
  if (order == SequenceOrder::kContiguous) {
    return {shard_size(sequence_size, group_rank), 0};
  }
  const auto num_chunks = 2 * num_ranks;
  return {shard_size(sequence_size, {num_chunks, rank}),
          shard_size(sequence_size, {num_chunks, num_chunks - 1 - rank})};
}

c10::SymInt checked_sequence_size(std::string_view op,
                                  SequenceOrder order,
                                  const at::Tensor& x,
                                  std::int64_t dim,
                                  const std::optional<c10::SymInt>& sequence_size,
                                  const GroupRank& group_rank,
                                  std::string_view name) {
  const auto own_size = x.sym_size(dim);
  if (!sequence_size.has_value()) {
    // An odd size cannot be that of all shards. Not all ranks would notice it below.
    TORCH_CHECK_VALUE(
        group_rank.num_ranks == 1 || order != SequenceOrder::kHeadTail || own_size % 2 == 0,
        op,
        ": got ",
        name,
        " of shape ",
        x.sym_sizes(),
        " in head_tail order without sequence_size, which needs an even number of "
        "tokens in dim ",
        dim,
        "; pass sequence_size, the number of tokens of all ranks.");
    return own_size * group_rank.num_ranks;
  }
  TORCH_CHECK_VALUE(
      *sequence_size >= 0 && own_size == shard_chunks(order, *sequence_size, group_rank).size(),
      op,
      ": got ",
      name,
      " of shape ",
      x.sym_sizes(),
      " on rank ",
      group_rank.rank,
      " of ",
      group_rank.num_ranks,
      " with sequence_size ",
      *sequence_size,
      " of dim ",
      dim,
      " in ",
      name_of(order),
      " order; pass this rank's chunks, of the sizes that torch.chunk returns, and the full size.");
  return *sequence_size;
}

}  // namespace weft::ops
