// moe_dispatch: sends each token to the experts that are chosen for it (Lepikhin et al., "GShard",
// 2020), without a capacity: no token is dropped. One all-to-all exchanges the counts, which are
// the sizes of the second one, of the rows. The host reads the counts. Their operator below
// autograd has a fake kernel in Python (weft.experts), because the number of rows of a rank depends
// on values.

#include "autograd_support.h"
#include "dispatch.h"
#include "expert_rows.h"
#include "group_collectives.h"
#include "shape.h"

#include <torch/library.h>

#include <string>
#include <tuple>
#include <utility>

namespace weft::ops {

namespace {

constexpr std::string_view kDispatch = "weft::moe_dispatch";

using Dispatched = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

void check_dispatch(const at::Tensor& x, const at::Tensor& expert_ids, std::int64_t num_experts) {
  check_floating(kDispatch, x, "x");
  TORCH_CHECK_VALUE(x.dim() == 2,
                    kDispatch,
                    ": got x of shape ",
                    x.sym_sizes(),
                    "; pass this rank's tokens, [tokens, features].");
  TORCH_CHECK_TYPE(expert_ids.scalar_type() == at::kLong || expert_ids.scalar_type() == at::kInt,
                   kDispatch,
                   ": got expert_ids of dtype ",
                   expert_ids.scalar_type(),
                   "; pass experts as int64 or int32.");
  TORCH_CHECK_VALUE(expert_ids.device() == x.device(),
                    kDispatch,
                    ": got expert_ids on ",
                    expert_ids.device(),
                    " with x on ",
                    x.device(),
                    "; move them to one device.");
  TORCH_CHECK_VALUE(expert_ids.dim() == 2 && expert_ids.sym_size(0) == x.sym_size(0),
                    kDispatch,
                    ": got expert_ids of shape ",
                    expert_ids.sym_sizes(),
                    " with x of shape ",
                    x.sym_sizes(),
                    "; pass the same number of experts for each token, [tokens, choices].");
  TORCH_CHECK_VALUE(num_experts >= 1,
                    kDispatch,
                    ": got num_experts ",
                    num_experts,
                    "; pass the number of experts of all ranks, at least 1.");
}

Dispatched moe_dispatch(const at::Tensor& x,
                        const at::Tensor& expert_ids,
                        std::int64_t num_experts,
                        std::string_view group_name) {
  check_dispatch(x, expert_ids, num_experts);
  resolve_group(kDispatch, std::string(group_name));
  return dispatch::moe_dispatch_saving(x, expert_ids, num_experts, group_name);
}

Dispatched moe_dispatch_kernel(const at::Tensor& x,
                               const at::Tensor& expert_ids,
                               std::int64_t num_experts,
                               std::string_view group_name) {
  const auto group = resolve_group(kDispatch, std::string(group_name));
  const auto [routes, counts] =
      exchange_counts(kDispatch, {expert_ids}, num_experts, group).front();
  auto own_rows = x.index_select(0, tokens_of_pairs(routes.order, x.size(0)));
  return {send_to_experts(kDispatch, std::move(own_rows), routes, group),
          counts,
          routes.order,
          routes.sent,
          routes.received};
}

at::Tensor moe_dispatch_backward(const at::Tensor& grad_rows,
                                 const at::Tensor& order,
                                 const at::Tensor& sent,
                                 const at::Tensor& received,
                                 c10::SymInt num_tokens,
                                 std::string_view group_name) {
  const auto group = resolve_group(kDispatch, std::string(group_name));
  const auto of_pairs = return_from_experts(kDispatch, grad_rows, {order, sent, received}, group);
  return sum_over_choices(of_pairs, order, num_tokens.expect_int(), /*weights=*/{});
}

class MoeDispatch : public torch::autograd::Function<MoeDispatch> {
 public:
  // Stores all results in `dispatched`, but returns the only one that has a gradient.
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            const at::Tensor& expert_ids,
                            std::int64_t num_experts,
                            const std::string& group_name,
                            Dispatched* dispatched) {
    const at::AutoDispatchBelowADInplaceOrView below;
    *dispatched = dispatch::moe_dispatch_saving(x, expert_ids, num_experts, group_name);
    const auto& [rows, counts, order, sent, received] = *dispatched;
    ctx->save_for_backward({order, sent, received});
    ctx->saved_data["num_tokens"] = x.sym_size(0);
    ctx->saved_data["group_name"] = group_name;
    return rows;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kDispatch);
    const auto saved = ctx->get_saved_variables();
    return {dispatch::moe_dispatch_backward(grads[0],
                                            saved[0],
                                            saved[1],
                                            saved[2],
                                            ctx->saved_data.at("num_tokens").toSymInt(),
                                            ctx->saved_data.at("group_name").toStringRef()),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

Dispatched moe_dispatch_autograd(const at::Tensor& x,
                                 const at::Tensor& expert_ids,
                                 std::int64_t num_experts,
                                 std::string_view group_name) {
  Dispatched dispatched;
  auto rows = MoeDispatch::apply(x, expert_ids, num_experts, std::string(group_name), &dispatched);
  std::get<0>(dispatched) = rows;
  return dispatched;
}

void register_dispatch_kernels(torch::Library& m) {
  m.impl("_moe_dispatch", TORCH_FN(moe_dispatch_kernel));
  m.impl("_moe_dispatch_backward", TORCH_FN(moe_dispatch_backward));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { register_dispatch_kernels(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_dispatch_kernels(m); }
TORCH_LIBRARY_IMPL(weft, Autograd, m) { m.impl("_moe_dispatch", TORCH_FN(moe_dispatch_autograd)); }
TORCH_LIBRARY_IMPL(weft, CompositeImplicitAutograd, m) {
  m.impl("moe_dispatch", TORCH_FN(moe_dispatch));
}

}  // namespace weft::ops
