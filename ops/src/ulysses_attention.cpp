// ulysses_attention: attention over a sequence that is sharded over the group, computed by heads
// (Jacobs et al., "DeepSpeed Ulysses", 2023). One all-to-all gives each rank its heads of query,
// key and value for the full sequence; torch's attention computes them; a second all-to-all gives
// each rank all heads of its shard of the sequence. Made of operators that have gradients and Meta
// kernels, so it needs neither; torch.compile and torch.export see these operators.

#include "attention_mask.h"
#include "attention_shape.h"
#include "dispatch.h"
#include "group_collectives.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/library.h>

#include <numeric>
#include <optional>

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

at::Tensor attention_by_heads(const at::Tensor& query,
                              const at::Tensor& key,
                              const at::Tensor& value,
                              const SequenceMaskArguments& mask,
                              std::optional<double> scale) {
  if (mask.window.has_value() || mask.document_offsets.has_value()) {
    // On a group of one rank: it computes no pairs that the mask excludes.
    return dispatch::ring_attention(query,
                                    key,
                                    value,
                                    /*group_name=*/"",
                                    mask.is_causal,
                                    scale,
                                    /*sequence_size=*/{},
                                    /*order=*/"contiguous",
                                    mask.window,
                                    mask.document_offsets);
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

at::Tensor ulysses_attention(const at::Tensor& query,
                             const at::Tensor& key,
                             const at::Tensor& value,
                             std::string_view group_name,
                             bool is_causal,
                             std::optional<double> scale,
                             std::optional<c10::SymInt> sequence_size,
                             std::optional<std::int64_t> window,
                             const dispatch::OptionalTensor& document_offsets) {
  const auto group_rank = rank_in(kUlysses, group_name);
  const auto num_ranks = group_rank.num_ranks;
  check_attention(kUlysses, query, key, value);
  const SequenceMaskArguments mask{is_causal, window, document_offsets};
  check_mask(kUlysses, query, mask);
  const auto full_size =
      gathered_size(kUlysses, query, 2, sequence_size, group_rank, "sequence_size", "query");
  if (document_offsets.has_value()) {
    dispatch::check_document_offsets(*document_offsets, full_size, kUlysses);
  }
  const auto heads = num_heads(query), kv_heads = num_heads(key);
  TORCH_CHECK_VALUE(heads % num_ranks == 0,
                    kUlysses,
                    ": got ",
                    heads,
                    " query heads on ",
                    num_ranks,
                    " ranks; pass a multiple of the number of ranks, or use "
                    "weft::ring_attention, which does not divide the heads.");
  if (num_ranks == 1) {
    return attention_by_heads(query, key, value, mask, scale);
  }
  // If the ranks do not divide the key/value heads, each head goes to all ranks that attend to it.
  const auto num_copies = std::lcm(kv_heads, num_ranks) / kv_heads;
  const auto kv_heads_of_rank = num_copies * kv_heads / num_ranks;
  const auto heads_of_rank = heads / num_ranks;
  const auto by_ranks = at::cat({by_rank(query, num_ranks),
                                 by_rank(repeat_heads(key, num_copies), num_ranks),
                                 by_rank(repeat_heads(value, num_copies), num_ranks)},
                                2);
  const auto own_heads = dispatch::all_to_all(by_ranks.flatten(1, 2), 1, 2, group_name, full_size);
  const auto out =
      attention_by_heads(own_heads.narrow(1, 0, heads_of_rank),
                         own_heads.narrow(1, heads_of_rank, kv_heads_of_rank),
                         own_heads.narrow(1, heads_of_rank + kv_heads_of_rank, kv_heads_of_rank),
                         mask,
                         scale);
  return dispatch::all_to_all(out, 2, 1, group_name, heads);
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
