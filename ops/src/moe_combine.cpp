// moe_combine: the inverse of moe_dispatch. One all-to-all returns the rows of the experts to the
// ranks of their tokens, which sum them over the choices of each token.

#include "autograd_support.h"
#include "dispatch.h"
#include "expert_rows.h"
#include "group_collectives.h"
#include "shape.h"

#include <torch/library.h>

#include <cstddef>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace weft::ops {

namespace {

constexpr std::string_view kCombine = "weft::moe_combine";

void check_weights(const at::Tensor& rows, const at::Tensor& weights) {
  const auto dtype = weights.scalar_type();
  const bool is_half = rows.scalar_type() == at::kHalf || rows.scalar_type() == at::kBFloat16;
  TORCH_CHECK_TYPE(dtype == rows.scalar_type() || (is_half && dtype == at::kFloat),
                   kCombine,
                   ": got weights of dtype ",
                   dtype,
                   " with rows of dtype ",
                   rows.scalar_type(),
                   "; pass the dtype of rows, or float32 with rows of half precision.");
  TORCH_CHECK_VALUE(weights.device() == rows.device(),
                    kCombine,
                    ": got weights on ",
                    weights.device(),
                    " with rows on ",
                    rows.device(),
                    "; move them to one device.");
  TORCH_CHECK_VALUE(weights.dim() == 2,
                    kCombine,
                    ": got weights of shape ",
                    weights.sym_sizes(),
                    "; pass one weight for each choice of each token, [tokens, choices].");
}

void check_int64(const at::Tensor& indices, std::string_view name) {
  TORCH_CHECK_TYPE(indices.scalar_type() == at::kLong,
                   kCombine,
                   ": got ",
                   name,
                   " of dtype ",
                   indices.scalar_type(),
                   "; pass the int64 tensor that moe_dispatch returns.");
}

// Checks counts with `num_dims` dims, the first of which is that of the ranks.
void check_counts(const at::Tensor& counts,
                  std::string_view name,
                  std::int64_t num_dims,
                  const at::Tensor& rows,
                  const GroupRank& group_rank) {
  check_int64(counts, name);
  TORCH_CHECK_VALUE(counts.is_cpu() || counts.device() == rows.device(),
                    kCombine,
                    ": got ",
                    name,
                    " on ",
                    counts.device(),
                    " with rows on ",
                    rows.device(),
                    "; pass it on the CPU, as moe_dispatch returns it.");
  TORCH_CHECK_VALUE(counts.dim() == num_dims && counts.sym_size(0) == group_rank.num_ranks,
                    kCombine,
                    ": got ",
                    name,
                    " of shape ",
                    counts.sym_sizes(),
                    " on ",
                    group_rank.num_ranks,
                    " ranks; pass the tensor that moe_dispatch returns in the same group.");
}

void check_combine(const at::Tensor& rows,
                   const at::Tensor& weights,
                   const at::Tensor& order,
                   const at::Tensor& sent,
                   const at::Tensor& received,
                   const GroupRank& group_rank) {
  check_floating(kCombine, rows, "rows");
  TORCH_CHECK_VALUE(rows.dim() == 2,
                    kCombine,
                    ": got rows of shape ",
                    rows.sym_sizes(),
                    "; pass the results of this rank's experts, [rows, features].");
  check_weights(rows, weights);
  check_int64(order, "order");
  TORCH_CHECK_VALUE(order.device() == rows.device(),
                    kCombine,
                    ": got order on ",
                    order.device(),
                    " with rows on ",
                    rows.device(),
                    "; move them to one device.");
  TORCH_CHECK_VALUE(order.dim() == 1 && order.sym_size(0) == weights.sym_numel(),
                    kCombine,
                    ": got order of shape ",
                    order.sym_sizes(),
                    " with weights of shape ",
                    weights.sym_sizes(),
                    "; pass the order that moe_dispatch returns for the same tokens.");
  check_counts(sent, "sent", 1, rows, group_rank);
  check_counts(received, "received", 2, rows, group_rank);
}

// Checks that `counts` are the numbers of `num_rows` rows.
void check_sum(const at::Tensor& counts, std::int64_t num_rows, std::string_view name) {
  std::int64_t sum = 0;
  bool is_valid = true;
  const auto values = host_counts(counts, num_rows);
  for (const auto value : values) {
    is_valid = is_valid && value >= 0 && value <= num_rows - sum;
    sum += is_valid ? value : 0;
  }
  TORCH_CHECK_VALUE(is_valid && sum == num_rows,
                    kCombine,
                    ": got ",
                    name,
                    " ",
                    at::IntArrayRef(values),
                    ", whose sum must be ",
                    num_rows,
                    "; pass the tensor that moe_dispatch returns.");
}

// Checks the values of the routes; those of `order` only on the CPU.
void check_routes(const at::Tensor& rows, const ExpertRoutes& routes) {
  check_sum(routes.sent, routes.order.numel(), "sent");
  check_sum(routes.received, rows.size(0), "received");
  if (!routes.order.is_cpu() || is_dry_run()) {
    return;
  }
  const auto num_pairs = routes.order.numel();
  std::vector<bool> is_found(static_cast<std::size_t>(num_pairs));
  bool is_permutation = true;
  for (const auto pair : host_counts(routes.order, num_pairs)) {
    is_permutation = is_permutation && pair >= 0 && pair < num_pairs &&
                     !is_found[static_cast<std::size_t>(pair)];
    if (is_permutation) {
      is_found[static_cast<std::size_t>(pair)] = true;
    }
  }
  TORCH_CHECK_VALUE(is_permutation,
                    kCombine,
                    ": got order that does not have each number from 0 to ",
                    num_pairs - 1,
                    " once; pass the tensor that moe_dispatch returns.");
}

at::Tensor moe_combine(const at::Tensor& rows,
                       const at::Tensor& weights,
                       const at::Tensor& order,
                       const at::Tensor& sent,
                       const at::Tensor& received,
                       std::string_view group_name) {
  check_combine(rows, weights, order, sent, received, rank_in(kCombine, group_name));
  return std::get<0>(
      dispatch::moe_combine_saving(rows, weights, order, sent, received, group_name));
}

std::tuple<at::Tensor, at::Tensor> moe_combine_kernel(const at::Tensor& rows,
                                                      const at::Tensor& weights,
                                                      const at::Tensor& order,
                                                      const at::Tensor& sent,
                                                      const at::Tensor& received,
                                                      std::string_view group_name) {
  const ExpertRoutes routes{order, sent, received};
  check_routes(rows, routes);
  const auto group = resolve_group(kCombine, std::string(group_name));
  const auto returned = return_from_experts(kCombine, rows, routes, group);
  auto y = sum_over_choices(returned, order, weights.size(0), weights);
  return {y, group ? returned : rows.new_empty({0})};
}

std::tuple<at::Tensor, at::Tensor> moe_combine_backward(const at::Tensor& grad_y,
                                                        const at::Tensor& weights,
                                                        const at::Tensor& returned,
                                                        const at::Tensor& order,
                                                        const at::Tensor& sent,
                                                        const at::Tensor& received,
                                                        c10::SymInt /*num_rows*/,
                                                        std::string_view group_name,
                                                        bool wants_rows,
                                                        bool wants_weights) {
  const auto num_tokens = weights.size(0);
  auto grad_rows = grad_y.new_empty({0}), grad_weights = weights.new_empty({0});
  if (wants_rows) {
    const auto group = resolve_group(kCombine, std::string(group_name));
    auto of_pairs = grad_y.index_select(0, tokens_of_pairs(order, num_tokens));
    of_pairs.mul_(weights.flatten().index_select(0, order).unsqueeze(1));
    grad_rows = send_to_experts(kCombine, std::move(of_pairs), {order, sent, received}, group);
  }
  if (wants_weights) {
    grad_weights = choice_weight_grad(grad_y, returned, order, weights);
  }
  return {grad_rows, grad_weights};
}

class MoeCombine : public torch::autograd::Function<MoeCombine> {
 public:
  // Stores the rows that have returned in `returned`, which has no gradient.
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& rows,
                            const at::Tensor& weights,
                            const at::Tensor& order,
                            const at::Tensor& sent,
                            const at::Tensor& received,
                            const std::string& group_name,
                            at::Tensor* returned) {
    const at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor y;
    std::tie(y, *returned) =
        dispatch::moe_combine_saving(rows, weights, order, sent, received, group_name);
    const bool is_alone = rank_in(kCombine, group_name).num_ranks == 1;
    const auto kept = weights.requires_grad() ? (is_alone ? rows : *returned) : at::Tensor();
    ctx->save_for_backward({weights, kept, order, sent, received});
    ctx->saved_data["num_rows"] = rows.sym_size(0);
    ctx->saved_data["group_name"] = group_name;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kCombine);
    const auto saved = ctx->get_saved_variables();
    const bool wants_rows = ctx->needs_input_grad(0), wants_weights = ctx->needs_input_grad(1);
    const auto [grad_rows, grad_weights] =
        dispatch::moe_combine_backward(grads[0],
                                       saved[0],
                                       saved[1].defined() ? saved[1] : grads[0].new_empty({0}),
                                       saved[2],
                                       saved[3],
                                       saved[4],
                                       ctx->saved_data.at("num_rows").toSymInt(),
                                       ctx->saved_data.at("group_name").toStringRef(),
                                       wants_rows,
                                       wants_weights);
    variable_list result(7);
    if (wants_rows) {
      result[0] = grad_rows;
    }
    if (wants_weights) {
      result[1] = grad_weights;
    }
    return result;
  }
};

std::tuple<at::Tensor, at::Tensor> moe_combine_autograd(const at::Tensor& rows,
                                                        const at::Tensor& weights,
                                                        const at::Tensor& order,
                                                        const at::Tensor& sent,
                                                        const at::Tensor& received,
                                                        std::string_view group_name) {
  at::Tensor returned;
  auto y =
      MoeCombine::apply(rows, weights, order, sent, received, std::string(group_name), &returned);
  return {y, returned};
}

void register_combine_kernels(torch::Library& m) {
  m.impl("_moe_combine", TORCH_FN(moe_combine_kernel));
  m.impl("_moe_combine_backward", TORCH_FN(moe_combine_backward));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { register_combine_kernels(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_combine_kernels(m); }
TORCH_LIBRARY_IMPL(weft, Autograd, m) { m.impl("_moe_combine", TORCH_FN(moe_combine_autograd)); }
TORCH_LIBRARY_IMPL(weft, CompositeImplicitAutograd, m) {
  m.impl("moe_combine", TORCH_FN(moe_combine));
}

}  // namespace weft::ops
