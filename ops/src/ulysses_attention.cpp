// ulysses_attention: attention over a sequence that is sharded over the group, computed by heads
// (Jacobs et al., "DeepSpeed Ulysses", 2023). One all-to-all gives each rank its heads of query,
// key and value for the full sequence; torch's attention computes them; a second all-to-all gives
// each rank all heads of its shard of the sequence. Made of operators that have gradients and Meta
// kernels, so it needs neither; torch.compile and torch.export see these operators.
//
// With a ring, the sequence is sharded over a grid of ranks: r groups of u ranks, where rank j of
// group i has the shard of rank i * u + j (Fang and Zhao, "USP: A Unified Sequence Parallelism
// Approach for Long Context Generative AI", 2024). The all-to-alls run within the groups, and give
// each rank its heads for the tokens of its group; the r ranks with the same heads compute ring
// attention. In the order "head_tail", the shards of a group are chunks i * u to i * u + u - 1 of
// 2 * r * u, and as many from the back: together, chunks i and 2r - 1 - i of 2r, which are those of
// rank i in the ring's order. Only the u tails must be reversed. Chunks of a grid have equal sizes
// in a sequence that zeros extend.

#include "attention_mask.h"
#include "attention_shape.h"
#include "dispatch.h"
#include "group_collectives.h"
#include "sequence_order.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/library.h>

#include <numeric>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace weft::ops {

namespace {

constexpr std::string_view kUlysses = "weft::ulysses_attention";

std::int64_t num_heads(const at::Tensor& x) { return x.sym_size(1).guard_int(__FILE__, __LINE__); }

// Returns x with each head `num_copies` times, the copies behind each other.
at::Tensor repeat_heads(const at::Tensor& x, std::int64_t num_copies) {
  return num_copies == 1 ? x : x.repeat_interleave(num_copies, 1);
}

// Returns x [batch, heads, ...] as [batch, ranks, heads of a rank, ...].
at::Tensor by_rank(const at::Tensor& x, std::int64_t num_ranks) {
  return x.unflatten(1, {num_ranks, num_heads(x) / num_ranks});
}

// Returns the chunks [batch, heads, tokens, ...] of x, of equal sizes, which are two for each rank.
std::vector<at::Tensor> chunks_of(const at::Tensor& x, std::int64_t num_ranks) {
  return x.unflatten(2, {2 * num_ranks, -1}).unbind(2);
}

// Returns x with the chunks in the order of the sequence: the heads of all ranks, and the tails
// from the last rank to the first.
at::Tensor heads_before_tails(const at::Tensor& x, std::int64_t num_ranks) {
  const auto by_rank = chunks_of(x, num_ranks);
  std::vector<at::Tensor> ordered(by_rank.size());
  for (std::size_t rank = 0; 2 * rank < ordered.size(); ++rank) {
    ordered[rank] = by_rank[2 * rank];
    ordered[ordered.size() - 1 - rank] = by_rank[2 * rank + 1];
  }
  return at::cat(ordered, 2);
}

// The opposite: returns x with the tail of each rank behind its head.
at::Tensor tails_behind_heads(const at::Tensor& x, std::int64_t num_ranks) {
  const auto ordered = chunks_of(x, num_ranks);
  std::vector<at::Tensor> by_rank(ordered.size());
  for (std::size_t rank = 0; 2 * rank < ordered.size(); ++rank) {
    by_rank[2 * rank] = ordered[rank];
    by_rank[2 * rank + 1] = ordered[ordered.size() - 1 - rank];
  }
  return at::cat(by_rank, 2);
}

// Returns x [batch, heads, tokens, ...] with zeros behind its tokens, `size` together.
at::Tensor with_padding(const at::Tensor& x, const c10::SymInt& size) {
  const auto num_tokens = x.sym_size(2);
  return num_tokens == size ? x : at::constant_pad_nd_symint(x, {0, 0, 0, size - num_tokens});
}

// The tokens of a group of ranks that exchange heads.
struct GroupTokens {
  std::string_view group_name;
  std::int64_t num_ranks;
  bool is_head_tail;
  c10::SymInt own_size;     // of this rank's shard
  c10::SymInt padded_size;  // of this rank's shard with zeros behind it
  c10::SymInt size;         // of all ranks' shards with zeros
};

// Returns this rank's heads of x [batch, heads, tokens, ...] for the tokens of its group.
at::Tensor exchange_heads(const at::Tensor& x, const GroupTokens& tokens) {
  const auto shard = with_padding(x, tokens.padded_size);
  const auto own_heads = dispatch::all_to_all(shard, 1, 2, tokens.group_name, tokens.size);
  return tokens.is_head_tail ? heads_before_tails(own_heads, tokens.num_ranks) : own_heads;
}

// The opposite: returns all `heads` of x for this rank's tokens.
at::Tensor exchange_tokens(const at::Tensor& x, std::int64_t heads, const GroupTokens& tokens) {
  const auto by_rank = tokens.is_head_tail ? tails_behind_heads(x, tokens.num_ranks) : x;
  const auto out = dispatch::all_to_all(by_rank, 2, 1, tokens.group_name, heads);
  return tokens.own_size == tokens.padded_size ? out : out.narrow_symint(2, 0, tokens.own_size);
}

// How the heads of a rank attend to the tokens of all ranks.
struct HeadAttention {
  SequenceMaskArguments mask;
  std::optional<double> scale;
  std::string_view ring_group_name;
  std::int64_t num_ring_ranks;
  std::string_view order;

  // Excludes the zeros behind a sequence of `size` tokens. With a causal mask, no token attends to
  // them.
  void exclude_padding(const c10::SymInt& size) {
    if (!mask.is_causal) {
      const auto offsets = mask.document_offsets.value_or(at::empty({0}, at::kLong));
      mask.document_offsets = at::constant_pad_nd(offsets, {0, 1}, size);
    }
  }

  // Returns the attention to `sequence_size` tokens, of which key and value have those of this rank
  // of the ring.
  at::Tensor operator()(const at::Tensor& query,
                        const at::Tensor& key,
                        const at::Tensor& value,
                        const c10::SymInt& sequence_size) const {
    if (num_ring_ranks > 1) {
      return by_ring(query, key, value, ring_group_name, sequence_size, order);
    }
    if (mask.window.has_value() || mask.document_offsets.has_value()) {
      // On a group of one rank: it computes no pairs that the mask excludes.
      return by_ring(query, key, value, /*group_name=*/"", /*sequence_size=*/{}, "contiguous");
    }
    // With fewer key/value heads, torch's kernel for the CPU would materialize the scores.
    const auto num_copies = num_heads(query) / num_heads(key);
    return at::scaled_dot_product_attention(query,
                                            repeat_heads(key, num_copies),
                                            repeat_heads(value, num_copies),
                                            /*attn_mask=*/{},
                                            /*dropout_p=*/0.0,
                                            mask.is_causal,
                                            scale);
  }

 private:
  at::Tensor by_ring(const at::Tensor& query,
                     const at::Tensor& key,
                     const at::Tensor& value,
                     std::string_view group_name,
                     std::optional<c10::SymInt> sequence_size,
                     std::string_view ring_order) const {
    return dispatch::ring_attention(query,
                                    key,
                                    value,
                                    group_name,
                                    mask.is_causal,
                                    scale,
                                    std::move(sequence_size),
                                    ring_order,
                                    mask.window,
                                    mask.document_offsets);
  }
};

// Returns the attention of all heads, each of which a rank of the group computes for the group.
at::Tensor attention_by_heads(const at::Tensor& query,
                              const at::Tensor& key,
                              const at::Tensor& value,
                              const GroupTokens& tokens,
                              const HeadAttention& attention) {
  const auto num_ranks = tokens.num_ranks, heads = num_heads(query), kv_heads = num_heads(key);
  // If the ranks do not divide the key/value heads, each head goes to all ranks that attend to it.
  const auto num_copies = std::lcm(kv_heads, num_ranks) / kv_heads;
  const auto kv_heads_of_rank = num_copies * kv_heads / num_ranks;
  const auto heads_of_rank = heads / num_ranks;
  const auto by_ranks = at::cat({by_rank(query, num_ranks),
                                 by_rank(repeat_heads(key, num_copies), num_ranks),
                                 by_rank(repeat_heads(value, num_copies), num_ranks)},
                                2);
  const auto own_heads = exchange_heads(by_ranks.flatten(1, 2), tokens);
  const auto out =
      attention(own_heads.narrow(1, 0, heads_of_rank),
                own_heads.narrow(1, heads_of_rank, kv_heads_of_rank),
                own_heads.narrow(1, heads_of_rank + kv_heads_of_rank, kv_heads_of_rank),
                tokens.size * attention.num_ring_ranks);
  return exchange_tokens(out, heads, tokens);
}

at::Tensor ulysses_attention(const at::Tensor& query,
                             const at::Tensor& key,
                             const at::Tensor& value,
                             std::string_view group_name,
                             bool is_causal,
                             std::optional<double> scale,
                             std::optional<c10::SymInt> sequence_size,
                             std::optional<std::int64_t> window,
                             const dispatch::OptionalTensor& document_offsets,
                             std::string_view order,
                             std::string_view ring_group_name) {
  const auto group = rank_in(kUlysses, group_name), ring = rank_in(kUlysses, ring_group_name);
  const auto num_ranks = group.num_ranks;
  const GroupRank in_grid{ring.num_ranks * num_ranks, ring.rank * num_ranks + group.rank};
  check_attention(kUlysses, query, key, value);
  HeadAttention attention{
      {is_causal, window, document_offsets}, scale, ring_group_name, ring.num_ranks, order};
  check_mask(kUlysses, query, attention.mask);
  const auto checked = checked_order(kUlysses, order);
  const auto full_size =
      checked_sequence_size(kUlysses, checked, query, 2, sequence_size, in_grid, "query");
  if (document_offsets.has_value()) {
    dispatch::check_document_offsets(*document_offsets, full_size, kUlysses);
  }
  TORCH_CHECK_VALUE(num_heads(query) % num_ranks == 0,
                    kUlysses,
                    ": got ",
                    num_heads(query),
                    " query heads on ",
                    num_ranks,
                    " ranks; pass a multiple of the number of ranks, or use "
                    "weft::ring_attention, which does not divide the heads (in strategies: "
                    "context_attention='ring' or 'ring_ulysses').");
  if (num_ranks == 1) {
    return attention(query, key, value, full_size);
  }
  const bool is_head_tail = checked == SequenceOrder::kHeadTail;
  const auto own_size = query.sym_size(2);
  GroupTokens tokens{group_name, num_ranks, is_head_tail, own_size, own_size, full_size};
  if (is_head_tail || ring.num_ranks > 1) {  // the all-to-all alone takes uneven shards
    if (sequence_size.has_value()) {
      const auto num_chunks = is_head_tail ? 2 : 1;
      tokens.padded_size = max_shard_size(full_size, num_chunks * in_grid.num_ranks) * num_chunks;
    }
    tokens.size = tokens.padded_size * num_ranks;
    if (tokens.size * ring.num_ranks != full_size) {
      attention.exclude_padding(full_size);
    }
  }
  return attention_by_heads(query, key, value, tokens, attention);
}

void check_offsets_kernel(const at::Tensor& document_offsets,
                          c10::SymInt sequence_size,
                          std::string_view op) {
  check_offsets(op, document_offsets, sequence_size.expect_int());
}

void check_offsets_meta_kernel(const at::Tensor& /*document_offsets*/,
                               c10::SymInt /*sequence_size*/,
                               std::string_view /*op*/) {}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("_check_document_offsets", TORCH_FN(check_offsets_kernel));
}
TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("_check_document_offsets", TORCH_FN(check_offsets_kernel));
}
TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("_check_document_offsets", TORCH_FN(check_offsets_meta_kernel));
}
TORCH_LIBRARY_IMPL(weft, CompositeImplicitAutograd, m) {
  m.impl("ulysses_attention", TORCH_FN(ulysses_attention));
}

}  // namespace weft::ops
