#include "attention_shape.h"

#include <c10/util/Exception.h>

namespace weft::ops {

namespace {

// Checks a tensor other than the query, of which only the number of heads may differ.
void check_key_value(std::string_view op,
                     const at::Tensor& query,
                     const at::Tensor& tensor,
                     std::string_view name) {
  check_like_x(op, query, tensor, name, "query");
  const auto matches = [&](std::int64_t dim) {
    return tensor.sym_size(dim) == query.sym_size(dim);
  };
  TORCH_CHECK_VALUE(
      tensor.dim() == 4 && matches(0) && matches(2) && matches(3),
      op,
      ": got ",
      name,
      " of shape ",
      tensor.sym_sizes(),
      " with query of shape ",
      query.sym_sizes(),
      "; pass [batch, kv_heads, tokens, head_dim] with the query's batch, tokens and head_dim.");
}

}  // namespace

void check_attention(std::string_view op,
                     const at::Tensor& query,
                     const at::Tensor& key,
                     const at::Tensor& value) {
  check_floating(op, query, "query");
  TORCH_CHECK_VALUE(query.dim() == 4,
                    op,
                    ": got query of shape ",
                    query.sym_sizes(),
                    "; pass [batch, heads, tokens, head_dim].");
  check_key_value(op, query, key, "key");
  check_key_value(op, query, value, "value");
  TORCH_CHECK_VALUE(key.sym_size(1) == value.sym_size(1) && key.sym_size(1) > 0 &&
                        query.sym_size(1) % key.sym_size(1) == 0,
                    op,
                    ": got ",
                    query.sym_size(1),
                    " query heads with ",
                    key.sym_size(1),
                    " heads of key and ",
                    value.sym_size(1),
                    " of value; pass equally many of key and value, a divisor of the number of "
                    "query heads.");
}

}  // namespace weft::ops
