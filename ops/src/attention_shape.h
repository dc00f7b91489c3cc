#pragma once

// The checks that the attention operators share.

#include "shape.h"

#include <ATen/core/Tensor.h>

#include <string_view>

namespace weft::ops {

// Checks query [batch, heads, tokens, head_dim], and key and value [batch, kv_heads, tokens,
// head_dim], where kv_heads divides heads: with fewer key/value heads, query head h attends to
// key/value head h / (heads / kv_heads).
void check_attention(std::string_view op,
                     const at::Tensor& query,
                     const at::Tensor& key,
                     const at::Tensor& value);

}  // namespace weft::ops
