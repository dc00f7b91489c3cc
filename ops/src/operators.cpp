#include "dispatch.h"

#include <weft/ops/operators.h>

namespace weft::ops {

at::Tensor column_row_mlp(const at::Tensor& x,
                          const ColumnRowMlpWeights& weights,
                          std::string_view activation,
                          std::string_view group_name,
                          bool recompute) {
  return dispatch::column_row_mlp(x,
                                  weights.w1,
                                  weights.w2,
                                  weights.w3,
                                  weights.b1,
                                  weights.b2,
                                  weights.b3,
                                  activation,
                                  group_name,
                                  recompute);
}

at::Tensor column_linear(const at::Tensor& x,
                         const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias,
                         std::string_view group_name) {
  return dispatch::column_linear(x, weight, bias, group_name);
}

at::Tensor row_linear(const at::Tensor& x,
                      const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias,
                      std::string_view group_name) {
  return dispatch::row_linear(x, weight, bias, group_name);
}

at::Tensor vocab_parallel_embedding(const at::Tensor& ids,
                                    const at::Tensor& weight,
                                    std::int64_t vocab_start,
                                    std::string_view group_name,
                                    std::optional<std::int64_t> vocab_size) {
  return dispatch::vocab_parallel_embedding(ids, weight, vocab_start, group_name, vocab_size);
}

at::Tensor copy_to_group(const at::Tensor& x, std::string_view group_name) {
  return dispatch::copy_to_group(x, group_name);
}

at::Tensor reduce_from_group(const at::Tensor& x, std::string_view group_name) {
  return dispatch::reduce_from_group(x, group_name);
}

std::string_view built_for_torch() { return WEFT_TORCH_VERSION; }

}  // namespace weft::ops
