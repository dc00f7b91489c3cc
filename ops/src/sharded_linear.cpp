// sharded_linear: a linear layer whose weight is sharded by rows over the group, as in FSDP; every
// rank has its own input. The full weight is not gathered: each shard in turn is broadcast by its
// owner, multiplied and freed, while the next broadcast is in flight, so a rank stores at most two
// shards of other ranks at a time. The backward does the same for grad_x, and reduces each shard's
// gradient to its owner. With W_r the shard of rank r, and grad_y_r the columns of grad_y that
// belong to it:
//
//   y = [x W_0ᵀ, x W_1ᵀ, ...] + b    grad_x = Σ grad_y_r W_r    grad_W_r = Σ over ranks grad_y_rᵀ x

#include "autograd_support.h"
#include "dispatch.h"
#include "group_collectives.h"
#include "shape.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

namespace weft::ops {

namespace {

constexpr std::string_view kSharded = "weft::sharded_linear";

using OptionalSize = std::optional<c10::SymInt>;

// Iterates over the shards of the weight, broadcasting them.
class Shards {
 public:
  // `num_rows`: of the full weight.
  Shards(ProcessGroupPtr group, std::int64_t num_rows)
      : group_(std::move(group)), num_rows_(num_rows) {}

  // Calls visit(shard, first_row) for each shard with rows, while the next broadcast is in flight.
  // `own`: this rank's shard.
  template <typename Visit>
  void for_each(const at::Tensor& own, const Visit& visit) const {
    auto next = broadcast_from(0, own);
    for (int rank = 0; rank < group_->getSize(); ++rank) {
      auto [shard, work] = std::move(next);
      if (rank + 1 < group_->getSize()) {
        next = broadcast_from(rank + 1, own);
      }
      work.wait();
      if (shard.size(0) > 0) {
        visit(shard, first_row(rank));
      }
    }
  }

  std::int64_t first_row(int rank) const {
    return std::min(max_shard_size(num_rows_, group_->getSize()).expect_int() * rank, num_rows_);
  }
  std::int64_t size_of(int rank) const {
    return shard_size(num_rows_, {group_->getSize(), rank}).expect_int();
  }
  const ProcessGroupPtr& group() const { return group_; }

 private:
  std::pair<at::Tensor, PendingCollective> broadcast_from(int rank, const at::Tensor& own) const {
    auto shard = rank == group_->getRank() ? own.contiguous()
                                           : at::empty({size_of(rank), own.size(1)}, own.options());
    // Nothing is computed before the first shard has arrived.
    auto work = start_broadcast(kSharded, shard, rank, group_, /*overlaps=*/rank > 0);
    return {std::move(shard), std::move(work)};
  }

  ProcessGroupPtr group_;
  std::int64_t num_rows_;
};

at::Tensor sharded_linear(const at::Tensor& x,
                          const at::Tensor& weight,
                          const OptionalTensor& bias,
                          std::string_view group_name,
                          OptionalSize out_features) {
  const auto group = resolve_group(kSharded, std::string(group_name));
  const auto shape = sharded_linear_shape(x, weight, bias, out_features, rank_in(group));
  if (!group) {
    return at::linear(x, weight, bias);
  }
  const auto num_rows = shape.back().expect_int();
  const auto tokens = as_matrix(x);
  auto y = at::empty({tokens.size(0), num_rows}, x.options());
  Shards(group, num_rows).for_each(weight, [&](const at::Tensor& shard, std::int64_t first_row) {
    auto columns = y.narrow(1, first_row, shard.size(0));
    at::mm_out(columns, tokens, shard.t());
  });
  if (bias.has_value()) {
    y.add_(all_gather(kSharded, *bias, 0, num_rows, group));
  }
  return y.view(C10_AS_INTARRAYREF_SLOW(shape));
}

// Returns grad_y times the full weight.
at::Tensor input_grad(const at::Tensor& grad_y,
                      const at::Tensor& weight,
                      std::string_view group_name) {
  const auto group = resolve_group(kSharded, std::string(group_name));
  if (!group) {
    return at::matmul(grad_y, weight);
  }
  const auto grads = as_matrix(grad_y);
  auto sizes = grad_y.sizes().vec();
  sizes.back() = weight.size(1);
  auto grad_x = at::zeros(sizes, grad_y.options());
  auto matrix = grad_x.view({grads.size(0), weight.size(1)});
  const Shards shards(group, grad_y.size(-1));
  shards.for_each(weight, [&](const at::Tensor& shard, std::int64_t first_row) {
    matrix.addmm_(grads.narrow(1, first_row, shard.size(0)), shard);
  });
  return grad_x;
}

// Returns this rank's rows of grad_yᵀ x, summed over the group.
at::Tensor shard_grad(const at::Tensor& grad_y, const at::Tensor& x, std::string_view group_name) {
  const auto group = resolve_group(kSharded, std::string(group_name));
  if (!group) {
    return weight_grad(grad_y, x);
  }
  const auto grads = as_matrix(grad_y);
  const auto tokens = as_matrix(x);
  const Shards shards(group, grad_y.size(-1));
  at::Tensor own;
  PendingCollective work;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    auto grad_shard =
        at::mm(grads.narrow(1, shards.first_row(rank), shards.size_of(rank)).t(), tokens);
    work.wait();  // the reduce of the previous shard overlapped with this product
    const bool is_last = rank + 1 == group->getSize();
    work = start_reduce(kSharded, grad_shard, rank, group, /*overlaps=*/!is_last);
    if (rank == group->getRank()) {
      own = std::move(grad_shard);
    }
  }
  work.wait();
  return own;
}

class ShardedLinear : public torch::autograd::Function<ShardedLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            const at::Tensor& weight,
                            const OptionalTensor& bias,
                            const std::string& group_name,
                            const OptionalSize& out_features) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["group_name"] = group_name;
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::sharded_linear(x, weight, bias, group_name, out_features);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kSharded);
    const auto& grad_y = grads[0];
    const auto saved = ctx->get_saved_variables();
    const auto& group_name = ctx->saved_data.at("group_name").toStringRef();
    variable_list result(5);
    if (ctx->needs_input_grad(0)) {
      result[0] = dispatch::sharded_linear_input_grad(grad_y, saved[1], group_name);
    }
    if (ctx->needs_input_grad(1)) {
      result[1] = dispatch::sharded_linear_shard_grad(grad_y, saved[0], group_name);
    }
    // autograd::Function does not count absent optional inputs.
    if (ctx->saved_data.at("has_bias").toBool() && ctx->needs_input_grad(2)) {
      result[2] = dispatch::reduce_scatter_to_sequence(bias_grad(grad_y), 0, group_name);
    }
    return result;
  }
};

at::Tensor sharded_linear_autograd(const at::Tensor& x,
                                   const at::Tensor& weight,
                                   const OptionalTensor& bias,
                                   std::string_view group_name,
                                   OptionalSize out_features) {
  return ShardedLinear::apply(x, weight, bias, std::string(group_name), out_features);
}

at::Tensor sharded_linear_meta(const at::Tensor& x,
                               const at::Tensor& weight,
                               const OptionalTensor& bias,
                               std::string_view group_name,
                               OptionalSize out_features) {
  return at::empty_symint(
      sharded_linear_shape(x, weight, bias, out_features, rank_in(kSharded, group_name)),
      x.options());
}

at::Tensor input_grad_meta(const at::Tensor& grad_y,
                           const at::Tensor& weight,
                           std::string_view /*group_name*/) {
  c10::SymDimVector sizes(grad_y.sym_sizes().begin(), grad_y.sym_sizes().end());
  sizes.back() = weight.sym_size(1);
  return at::empty_symint(sizes, grad_y.options());
}

at::Tensor shard_grad_meta(const at::Tensor& grad_y,
                           const at::Tensor& x,
                           std::string_view group_name) {
  return at::empty_symint(
      {shard_size(grad_y.sym_size(-1), rank_in(kSharded, group_name)), x.sym_size(-1)},
      x.options());
}

void register_sharded_linear(torch::Library& m) {
  m.impl("sharded_linear", TORCH_FN(sharded_linear));
  m.impl("_sharded_linear_input_grad", TORCH_FN(input_grad));
  m.impl("_sharded_linear_shard_grad", TORCH_FN(shard_grad));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { register_sharded_linear(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_sharded_linear(m); }
TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("sharded_linear", TORCH_FN(sharded_linear_meta));
  m.impl("_sharded_linear_input_grad", TORCH_FN(input_grad_meta));
  m.impl("_sharded_linear_shard_grad", TORCH_FN(shard_grad_meta));
}
TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("sharded_linear", TORCH_FN(sharded_linear_autograd));
}

}  // namespace weft::ops
