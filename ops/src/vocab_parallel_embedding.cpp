// vocab_parallel_embedding: each rank looks up the ids of its own rows and uses zeros for all other
// ids; one all-reduce sums the results. The gradient of a rank's rows needs no communication.

#include "autograd_support.h"
#include "dispatch.h"
#include "group.h"
#include "shape.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <string>

namespace weft::ops {

namespace {

constexpr std::string_view kOp = "weft::vocab_parallel_embedding";

// Returns (row indices within the shard, mask of the ids outside of it); masked indices are 0.
std::pair<at::Tensor, at::Tensor> local_rows(const at::Tensor& ids,
                                             std::int64_t vocab_start,
                                             std::int64_t num_rows) {
  auto rows = ids.to(at::kLong).sub(vocab_start);  // int32 might overflow
  auto is_elsewhere = rows.lt(0).logical_or_(rows.ge(num_rows));
  rows.masked_fill_(is_elsewhere, 0);
  return {rows, is_elsewhere};
}

// Raises IndexError for CPU ids outside [0, vocab_size). Checks nothing without vocab_size, or on
// CUDA, where reading the ids would synchronize with the device.
void check_ids(const at::Tensor& ids, std::optional<std::int64_t> vocab_size) {
  if (!vocab_size.has_value() || !ids.is_cpu() || ids.numel() == 0) {
    return;
  }
  const auto [lowest, highest] = ids.aminmax();
  TORCH_CHECK_INDEX(lowest.item().toLong() >= 0 && highest.item().toLong() < *vocab_size,
                    kOp,
                    ": got token ids from ",
                    lowest.item().toLong(),
                    " to ",
                    highest.item().toLong(),
                    "; pass ids from 0 to vocab_size - 1 = ",
                    *vocab_size - 1,
                    ".");
}

at::Tensor vocab_parallel_embedding(const at::Tensor& ids,
                                    const at::Tensor& weight,
                                    std::int64_t vocab_start,
                                    std::string_view group_name,
                                    std::optional<std::int64_t> vocab_size) {
  const auto sizes = vocab_embedding_shape(ids, weight, vocab_start);
  check_ids(ids, vocab_size);
  const auto group = resolve_group(kOp, std::string(group_name));
  at::Tensor y;
  if (weight.size(0) == 0) {
    y = at::zeros_symint(sizes, weight.options());
  } else {
    const auto [rows, is_elsewhere] = local_rows(ids, vocab_start, weight.size(0));
    y = at::embedding(weight, rows).masked_fill_(is_elsewhere.unsqueeze(-1), 0);
  }
  all_reduce_(kOp, y, group);
  return y;
}

at::Tensor vocab_embedding_backward(const at::Tensor& grad,
                                    const at::Tensor& ids,
                                    c10::SymInt num_rows,
                                    std::int64_t vocab_start) {
  const auto num_local_rows = num_rows.expect_int();
  // On CUDA, torch's kernel writes outside of a gradient without columns.
  if (num_local_rows == 0 || grad.size(-1) == 0) {
    return at::zeros({num_local_rows, grad.size(-1)}, grad.options());
  }
  const auto [rows, is_elsewhere] = local_rows(ids, vocab_start, num_local_rows);
  const auto own_grad = grad.masked_fill(is_elsewhere.unsqueeze(-1), 0);
  return at::embedding_dense_backward(
      own_grad, rows, num_local_rows, /*padding_idx=*/-1, /*scale_grad_by_freq=*/false);
}

class VocabParallelEmbedding : public torch::autograd::Function<VocabParallelEmbedding> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& ids,
                            const at::Tensor& weight,
                            std::int64_t vocab_start,
                            const std::string& group_name,
                            std::optional<std::int64_t> vocab_size) {
    ctx->save_for_backward({ids});
    const at::AutoDispatchBelowADInplaceOrView below;
    auto y = dispatch::vocab_parallel_embedding(ids, weight, vocab_start, group_name, vocab_size);
    ctx->saved_data["num_rows"] = weight.sym_size(0);  // the call above checks the dims
    ctx->saved_data["vocab_start"] = vocab_start;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kOp);
    const auto ids = ctx->get_saved_variables()[0];
    return {at::Tensor(),
            dispatch::vocab_embedding_backward(grads[0],
                                               ids,
                                               ctx->saved_data.at("num_rows").toSymInt(),
                                               ctx->saved_data.at("vocab_start").toInt()),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

at::Tensor vocab_parallel_embedding_autograd(const at::Tensor& ids,
                                             const at::Tensor& weight,
                                             std::int64_t vocab_start,
                                             std::string_view group_name,
                                             std::optional<std::int64_t> vocab_size) {
  return VocabParallelEmbedding::apply(
      ids, weight, vocab_start, std::string(group_name), vocab_size);
}

at::Tensor vocab_parallel_embedding_meta(const at::Tensor& ids,
                                         const at::Tensor& weight,
                                         std::int64_t vocab_start,
                                         std::string_view /*group_name*/,
                                         std::optional<std::int64_t> /*vocab_size*/) {
  return at::empty_symint(vocab_embedding_shape(ids, weight, vocab_start), weight.options());
}

at::Tensor vocab_embedding_backward_meta(const at::Tensor& grad,
                                         const at::Tensor& /*ids*/,
                                         c10::SymInt num_rows,
                                         std::int64_t /*vocab_start*/) {
  return at::empty_symint({std::move(num_rows), grad.sym_size(-1)}, grad.options());
}

void register_embedding_kernels(torch::Library& m) {
  m.impl("vocab_parallel_embedding", TORCH_FN(vocab_parallel_embedding));
  m.impl("_vocab_embedding_backward", TORCH_FN(vocab_embedding_backward));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { register_embedding_kernels(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_embedding_kernels(m); }
TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("vocab_parallel_embedding", TORCH_FN(vocab_parallel_embedding_meta));
  m.impl("_vocab_embedding_backward", TORCH_FN(vocab_embedding_backward_meta));
}
TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("vocab_parallel_embedding", TORCH_FN(vocab_parallel_embedding_autograd));
}

}  // namespace weft::ops
