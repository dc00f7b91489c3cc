#pragma once

// torch's attention kernels with the log-sum-exp of each query, and their backward: on the CPU,
// flash attention; on CUDA, the kernel that torch's scaled_dot_product_attention chooses, or matrix
// products where it has no kernel (float64, for example). All functions work below autograd.
//
// Shapes: query, out and their gradients [batch, heads, tokens, head_dim]; key, value and their
// gradients [batch, kv_heads, tokens, head_dim]; lse [batch, heads, tokens].

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace weft::ops {

// A mask: query i attends to key j if 0 <= i + offset - j < window.
struct AttentionBand {
  std::int64_t offset = 0;
  std::int64_t window = 0;
};

struct AttentionOptions {
  bool is_causal = false;                  // query i attends to keys 0 to i of the block
  std::optional<AttentionBand> band = {};  // without is_causal; each query must attend to a key
  std::optional<double> scale = {};        // default: 1 / sqrt(head_dim)
};

struct AttentionResult {
  at::Tensor out;
  at::Tensor lse;  // float64 for float64, otherwise float32
};

struct AttentionGradients {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
};

enum class AttentionKernel : std::uint8_t { kCpuFlash, kFlash, kEfficient, kProducts };

// Returns the kernel for these tensors. It depends on their dtypes, sizes and strides, the device
// and torch's settings (torch.backends.cuda.enable_flash_sdp and others). REQUIRES: kv_heads is
// heads.
AttentionKernel attention_kernel(const at::Tensor& query,
                                 const at::Tensor& key,
                                 const at::Tensor& value,
                                 const AttentionOptions& options);

// Whether the kernel supports fewer heads of key and value than of query. Otherwise, kv_heads must
// be heads.
bool supports_grouped_heads(AttentionKernel kernel);

// REQUIRES: the tensors are not empty; with a causal mask, there are as many queries as keys.
AttentionResult run_attention(AttentionKernel kernel,
                              const at::Tensor& query,
                              const at::Tensor& key,
                              const at::Tensor& value,
                              const AttentionOptions& options);

// Returns the gradients, in the inputs' dtype. `attention` may be the result over more keys than
// these: then the gradients are those of its part that belongs to these keys.
AttentionGradients run_attention_backward(AttentionKernel kernel,
                                          const at::Tensor& grad_out,
                                          const at::Tensor& query,
                                          const at::Tensor& key,
                                          const at::Tensor& value,
                                          const AttentionResult& attention,
                                          const AttentionOptions& options);

}  // namespace weft::ops
