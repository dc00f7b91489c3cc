#include "attention_kernels.h"

#include <ATen/OpMathType.h>
#include <ATen/SDPBackend.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <utility>

namespace weft::ops {

namespace {

constexpr double kNoDropout = 0.0;
constexpr std::int64_t kFlashHeadDims = 8;      // flash attention needs a multiple of them
constexpr std::int64_t kEfficientQueries = 32;  // the lse of the efficient kernel is padded to a
                                                // multiple of them, with infinity

double scale_of(const at::Tensor& query, const AttentionOptions& options) {
  return options.scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3))));
}

// Returns x with its last dim padded with `value` to a multiple of `multiple`.
at::Tensor padded(const at::Tensor& x, std::int64_t multiple, double value = 0.0) {
  const auto missing = (multiple - x.size(-1) % multiple) % multiple;
  return missing == 0 ? x : at::constant_pad_nd(x, {0, missing}, value);
}

// Returns which of the pairs [queries, keys] the band excludes.
at::Tensor hidden_pairs(const at::Tensor& query, const at::Tensor& key, const AttentionBand& band) {
  const auto all = at::ones({query.size(2), key.size(2)}, query.options().dtype(at::kBool));
  return all.tril(band.offset).triu_(band.offset - band.window + 1).logical_not_();
}

// Returns what the CPU's kernel adds to the scores.
std::optional<at::Tensor> additive_mask(const at::Tensor& query,
                                        const at::Tensor& key,
                                        const AttentionOptions& options) {
  if (!options.band.has_value()) {
    return {};
  }
  auto mask = at::zeros({query.size(2), key.size(2)}, query.options());
  return mask.masked_fill_(hidden_pairs(query, key, *options.band),
                           -std::numeric_limits<double>::infinity());
}

// An argument that a kernel reads only with dropout.
at::Tensor no_random_state(const at::Tensor& x, at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, x.options().dtype(dtype));
}

AttentionResult cpu_flash(const at::Tensor& query,
                          const at::Tensor& key,
                          const at::Tensor& value,
                          const AttentionOptions& options) {
  auto [out, lse] =
      at::_scaled_dot_product_flash_attention_for_cpu(query,
                                                      key,
                                                      value,
                                                      kNoDropout,
                                                      options.is_causal,
                                                      additive_mask(query, key, options),
                                                      options.scale);
  return {std::move(out), std::move(lse)};
}

AttentionGradients cpu_flash_backward(const at::Tensor& grad_out,
                                      const at::Tensor& query,
                                      const at::Tensor& key,
                                      const at::Tensor& value,
                                      const AttentionResult& attention,
                                      const AttentionOptions& options) {
  auto [grad_query, grad_key, grad_value] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(grad_out,
                                                               query,
                                                               key,
                                                               value,
                                                               attention.out,
                                                               attention.lse,
                                                               kNoDropout,
                                                               options.is_causal,
                                                               additive_mask(query, key, options),
                                                               options.scale);
  return {std::move(grad_query), std::move(grad_key), std::move(grad_value)};
}

AttentionResult flash(const at::Tensor& query,
                      const at::Tensor& key,
                      const at::Tensor& value,
                      const AttentionOptions& options) {
  const auto result = at::_scaled_dot_product_flash_attention(padded(query, kFlashHeadDims),
                                                              padded(key, kFlashHeadDims),
                                                              padded(value, kFlashHeadDims),
                                                              kNoDropout,
                                                              options.is_causal,
                                                              /*return_debug_mask=*/false,
                                                              scale_of(query, options));
  return {std::get<0>(result).narrow(3, 0, query.size(3)), std::get<1>(result)};
}

AttentionGradients flash_backward(const at::Tensor& grad_out,
                                  const at::Tensor& query,
                                  const at::Tensor& key,
                                  const at::Tensor& value,
                                  const AttentionResult& attention,
                                  const AttentionOptions& options) {
  const auto [grad_query, grad_key, grad_value] =
      at::_scaled_dot_product_flash_attention_backward(padded(grad_out, kFlashHeadDims),
                                                       padded(query, kFlashHeadDims),
                                                       padded(key, kFlashHeadDims),
                                                       padded(value, kFlashHeadDims),
                                                       padded(attention.out, kFlashHeadDims),
                                                       attention.lse.contiguous(),
                                                       /*cum_seq_q=*/{},
                                                       /*cum_seq_k=*/{},
                                                       query.size(2),
                                                       key.size(2),
                                                       kNoDropout,
                                                       options.is_causal,
                                                       no_random_state(query, {2}, at::kUInt64),
                                                       no_random_state(query, {}, at::kUInt64),
                                                       scale_of(query, options));
  const auto head_dim = query.size(3);
  return {grad_query.narrow(3, 0, head_dim),
          grad_key.narrow(3, 0, head_dim),
          grad_value.narrow(3, 0, head_dim)};
}

AttentionResult efficient(const at::Tensor& query,
                          const at::Tensor& key,
                          const at::Tensor& value,
                          const AttentionOptions& options) {
  const auto result = at::_scaled_dot_product_efficient_attention(query,
                                                                  key,
                                                                  value,
                                                                  /*attn_bias=*/std::nullopt,
                                                                  /*compute_log_sumexp=*/true,
                                                                  kNoDropout,
                                                                  options.is_causal,
                                                                  options.scale);
  return {std::get<0>(result), std::get<1>(result).narrow(2, 0, query.size(2))};
}

AttentionGradients efficient_backward(const at::Tensor& grad_out,
                                      const at::Tensor& query,
                                      const at::Tensor& key,
                                      const at::Tensor& value,
                                      const AttentionResult& attention,
                                      const AttentionOptions& options) {
  const auto infinity = std::numeric_limits<double>::infinity();
  const auto lse = padded(attention.lse, kEfficientQueries, infinity).contiguous();
  const auto result =
      at::_scaled_dot_product_efficient_attention_backward(grad_out,
                                                           query,
                                                           key,
                                                           value,
                                                           /*attn_bias=*/{},
                                                           attention.out,
                                                           lse,
                                                           no_random_state(query, {}, at::kLong),
                                                           no_random_state(query, {}, at::kLong),
                                                           kNoDropout,
                                                           {true, true, true, false},
                                                           options.is_causal,
                                                           options.scale);
  return {std::get<0>(result), std::get<1>(result), std::get<2>(result)};
}

// Returns the scores of all pairs, -infinity where the causal mask is, in the dtype of lse.
at::Tensor scores_of(const at::Tensor& query,
                     const at::Tensor& key,
                     const AttentionOptions& options) {
  const auto dtype = at::toOpMathType(query.scalar_type());
  auto scores = at::matmul(query.to(dtype), key.to(dtype).transpose(2, 3));
  scores.mul_(scale_of(query, options));
  const auto band = options.is_causal ? std::optional(AttentionBand{0, key.size(2)}) : options.band;
  if (band.has_value()) {
    scores.masked_fill_(hidden_pairs(query, key, *band), -std::numeric_limits<double>::infinity());
  }
  return scores;
}

AttentionResult products(const at::Tensor& query,
                         const at::Tensor& key,
                         const at::Tensor& value,
                         const AttentionOptions& options) {
  auto scores = scores_of(query, key, options);
  auto lse = at::logsumexp(scores, 3);
  const auto probabilities = scores.sub_(lse.unsqueeze(-1)).exp_();
  auto out = at::matmul(probabilities, value.to(lse.scalar_type())).to(query.scalar_type());
  return {std::move(out), std::move(lse)};
}

// With probabilities P, scores S and out O: dS = P * (dP - rowsum(dO * O)), as Dao et al.,
// "FlashAttention", 2022, derive it. O and the lse in P are those over all keys.
AttentionGradients products_backward(const at::Tensor& grad_out,
                                     const at::Tensor& query,
                                     const at::Tensor& key,
                                     const at::Tensor& value,
                                     const AttentionResult& attention,
                                     const AttentionOptions& options) {
  const auto dtype = attention.lse.scalar_type();
  const auto probabilities =
      scores_of(query, key, options).sub_(attention.lse.unsqueeze(-1)).exp_();
  const auto grad = grad_out.to(dtype);
  const auto row_sums = (grad * attention.out.to(dtype)).sum(3, /*keepdim=*/true);
  auto grad_value = at::matmul(probabilities.transpose(2, 3), grad);
  auto grad_scores = at::matmul(grad, value.to(dtype).transpose(2, 3));
  grad_scores.sub_(row_sums).mul_(probabilities).mul_(scale_of(query, options));
  auto grad_query = at::matmul(grad_scores, key.to(dtype));
  auto grad_key = at::matmul(grad_scores.transpose(2, 3), query.to(dtype));
  return {std::move(grad_query), std::move(grad_key), std::move(grad_value)};
}

}  // namespace

AttentionKernel attention_kernel(const at::Tensor& query,
                                 const at::Tensor& key,
                                 const at::Tensor& value,
                                 const AttentionOptions& options) {
  if (query.is_cpu()) {
    return AttentionKernel::kCpuFlash;
  }
  if (options.band.has_value()) {  // torch's kernels take no window
    return AttentionKernel::kProducts;
  }
  const auto choice = at::_fused_sdp_choice(query,
                                            key,
                                            value,
                                            /*attn_mask=*/{},
                                            kNoDropout,
                                            options.is_causal,
                                            options.scale);
  switch (static_cast<at::SDPBackend>(choice)) {
    case at::SDPBackend::flash_attention:
    case at::SDPBackend::cudnn_attention:  // supports no more dtypes and sizes than flash attention
      return AttentionKernel::kFlash;
    case at::SDPBackend::efficient_attention:
      return AttentionKernel::kEfficient;
    default:
      return AttentionKernel::kProducts;
  }
}

bool supports_grouped_heads(AttentionKernel kernel) { return kernel == AttentionKernel::kFlash; }

AttentionResult run_attention(AttentionKernel kernel,
                              const at::Tensor& query,
                              const at::Tensor& key,
                              const at::Tensor& value,
                              const AttentionOptions& options) {
  switch (kernel) {
    case AttentionKernel::kCpuFlash:
      return cpu_flash(query, key, value, options);
    case AttentionKernel::kFlash:
      return flash(query, key, value, options);
    case AttentionKernel::kEfficient:
      return efficient(query, key, value, options);
    case AttentionKernel::kProducts:
      break;
  }
  return products(query, key, value, options);
}

AttentionGradients run_attention_backward(AttentionKernel kernel,
                                          const at::Tensor& grad_out,
                                          const at::Tensor& query,
                                          const at::Tensor& key,
                                          const at::Tensor& value,
                                          const AttentionResult& attention,
                                          const AttentionOptions& options) {
  switch (kernel) {
    case AttentionKernel::kCpuFlash:
      return cpu_flash_backward(grad_out, query, key, value, attention, options);
    case AttentionKernel::kFlash:
      return flash_backward(grad_out, query, key, value, attention, options);
    case AttentionKernel::kEfficient:
      return efficient_backward(grad_out, query, key, value, attention, options);
    case AttentionKernel::kProducts:
      break;
  }
  return products_backward(grad_out, query, key, value, attention, options);
}

}  // namespace weft::ops
