#include "attention_block.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <utility>

namespace weft::ops {

namespace {

// Returns x, copied unless its rows are contiguous and do not overlap, as BLAS requires.
at::Tensor with_matrix_strides(const at::Tensor& x) {
  return x.stride(-1) == 1 && x.stride(-2) >= x.size(-1) ? x : x.contiguous();
}

// Returns x with the strides of empty_attention(), copied if it has others: those that the kernel
// returns depend on the release of torch.
at::Tensor with_tokens_first(const at::Tensor& x) {
  return x.transpose(1, 2).contiguous().transpose(1, 2);
}

// Returns, of each group of query heads that attend to one key/value head, the one at `index`. A
// view.
at::Tensor heads_at(const at::Tensor& x, std::int64_t num_kv_heads, std::int64_t index) {
  return x.unflatten(1, {num_kv_heads, x.size(1) / num_kv_heads}).select(2, index);
}

// The calls of a kernel that compute a block: one, or if the kernel needs as many heads of query as
// of key, one for each query head of a group.
struct KernelCalls {
  AttentionKernel kernel;
  std::int64_t count;
};

KernelCalls kernel_calls(const at::Tensor& query,
                         const at::Tensor& key,
                         const at::Tensor& value,
                         const AttentionOptions& options) {
  const auto kernel = attention_kernel(heads_at(query, key.size(1), 0), key, value, options);
  return {kernel, supports_grouped_heads(kernel) ? 1 : query.size(1) / key.size(1)};
}

}  // namespace

AttentionResult empty_attention(const at::Tensor& query) {
  const auto lse_options = query.options().dtype(at::toOpMathType(query.scalar_type()));
  const auto batch = query.sym_size(0), heads = query.sym_size(1), tokens = query.sym_size(2);
  return {
      at::empty_symint({batch, tokens, heads, query.sym_size(3)}, query.options()).transpose(1, 2),
      at::empty_symint({batch, tokens, heads}, lse_options).transpose(1, 2)};
}

AttentionResult attend(const at::Tensor& query,
                       const at::Tensor& key,
                       const at::Tensor& value,
                       const AttentionOptions& options) {
  const auto rows = with_matrix_strides(query);
  const auto keys = with_matrix_strides(key), values = with_matrix_strides(value);
  const auto num_kv_heads = key.size(1);
  const auto [kernel, num_calls] = kernel_calls(rows, keys, values, options);
  if (num_calls == 1) {
    return run_attention(kernel, rows, keys, values, options);
  }
  auto result = empty_attention(query);
  for (std::int64_t i = 0; i < num_calls; ++i) {
    const auto of_heads =
        run_attention(kernel, heads_at(rows, num_kv_heads, i), keys, values, options);
    heads_at(result.out, num_kv_heads, i).copy_(of_heads.out);
    heads_at(result.lse, num_kv_heads, i).copy_(of_heads.lse);
  }
  return result;
}

void AttentionSum::add(AttentionResult block, const TokenRange& queries) {
  const auto dtype = block.lse.scalar_type();
  const bool has_all = queries.size == num_queries_ && block.out.size(0) == num_rows_;
  if (is_empty() && has_all) {
    out_ = with_tokens_first(block.out.to(dtype));
    lse_ = with_tokens_first(block.lse);
    return;
  }
  if (is_empty()) {
    const auto& out = block.out;
    const auto options = out.options().dtype(dtype);
    out_ = at::zeros({num_rows_, num_queries_, out.size(1), out.size(3)}, options).transpose(1, 2);
    lse_ = at::full({num_rows_, num_queries_, out.size(1)},
                    -std::numeric_limits<double>::infinity(),
                    options)
               .transpose(1, 2);
  }
  auto out = queries.of(out_);
  auto lse = queries.of(lse_);
  const auto new_lse = at::logaddexp(lse, block.lse);
  out.mul_(lse.sub_(new_lse).exp_().unsqueeze(-1));
  out.addcmul_(block.out.to(dtype), block.lse.sub_(new_lse).exp_().unsqueeze(-1));
  lse.copy_(new_lse);
}

AttentionResult AttentionSum::take(at::ScalarType dtype) {
  return {std::exchange(out_, {}).to(dtype), std::exchange(lse_, {})};
}

void add_gradients(const AttentionGradients& gradients,
                   const at::Tensor& grad_out,
                   const at::Tensor& query,
                   const at::Tensor& key,
                   const at::Tensor& value,
                   const AttentionResult& attention,
                   const AttentionOptions& options) {
  const auto rows = with_matrix_strides(query);
  const auto keys = with_matrix_strides(key), values = with_matrix_strides(value);
  const auto num_kv_heads = key.size(1);
  const auto out = with_matrix_strides(attention.out);
  const auto [kernel, num_calls] = kernel_calls(rows, keys, values, options);
  for (std::int64_t i = 0; i < num_calls; ++i) {
    const auto of_heads = [&, num_calls = num_calls](const at::Tensor& x) {
      return num_calls == 1 ? x : heads_at(x, num_kv_heads, i);
    };
    const auto block = run_attention_backward(kernel,
                                              of_heads(grad_out),
                                              of_heads(rows),
                                              keys,
                                              values,
                                              {of_heads(out), of_heads(attention.lse)},
                                              options);
    of_heads(gradients.query).add_(block.query);
    gradients.key.add_(block.key);
    gradients.value.add_(block.value);
  }
}

}  // namespace weft::ops
