// The parts of moe_dispatch and moe_combine, to overlap the exchange of one chunk of tokens with
// the computation of another: each all-to-all is started by one operator and waited for by a method
// of its result. One all-to-all exchanges the counts of all chunks. The autograd formula is that of
// weft.strategy.experts.halves, which runs the module's own code between these parts.

#include "moe_in_flight.h"

#include "dispatch.h"
#include "expert_rows.h"
#include "group.h"

#include <torch/library.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace weft::ops {

namespace {

constexpr std::string_view kDispatchInFlight = "weft::moe_dispatch";
constexpr std::string_view kCombineInFlight = "weft::moe_combine";

using InFlight = c10::intrusive_ptr<ExpertRowsInFlight>;
using Tensors = std::vector<at::Tensor>;

std::tuple<Tensors, Tensors, Tensors, Tensors> moe_routes(at::TensorList expert_ids,
                                                          std::int64_t num_experts,
                                                          std::string_view group_name) {
  const auto group = resolve_group(kDispatchInFlight, std::string(group_name));
  Tensors counts, order, sent, received;
  for (auto& chunk : exchange_counts(kDispatchInFlight, expert_ids.vec(), num_experts, group)) {
    counts.push_back(std::move(chunk.counts));
    order.push_back(std::move(chunk.routes.order));
    sent.push_back(std::move(chunk.routes.sent));
    received.push_back(std::move(chunk.routes.received));
  }
  return {counts, order, sent, received};
}

// `weights` [tokens, k], if any, multiply the rows of the tokens' pairs.
InFlight moe_start_dispatch(const at::Tensor& x,
                            const at::Tensor& order,
                            const OptionalTensor& weights,
                            const at::Tensor& sent,
                            const at::Tensor& received,
                            std::string_view group_name) {
  const auto group = resolve_group(kDispatchInFlight, std::string(group_name));
  auto of_pairs = x.index_select(0, tokens_of_pairs(order, x.size(0)));
  if (weights.has_value()) {
    of_pairs.mul_(weights->flatten().index_select(0, order).unsqueeze(1));
  }
  return c10::make_intrusive<ExpertRowsInFlight>(start_to_experts(
      kDispatchInFlight, std::move(of_pairs), {order, sent, received}, group, /*overlaps=*/true));
}

InFlight moe_start_return(const at::Tensor& rows,
                          const at::Tensor& sent,
                          const at::Tensor& received,
                          std::string_view group_name) {
  const auto group = resolve_group(kCombineInFlight, std::string(group_name));
  return c10::make_intrusive<ExpertRowsInFlight>(start_from_experts(
      kCombineInFlight, rows, {/*order=*/{}, sent, received}, group, /*overlaps=*/true));
}

at::Tensor moe_sum(const at::Tensor& rows,
                   const at::Tensor& order,
                   std::int64_t num_tokens,
                   const OptionalTensor& weights) {
  return sum_over_choices(rows, order, num_tokens, weights.value_or(at::Tensor()));
}

void register_parts(torch::Library& m) {
  m.impl("_moe_routes", TORCH_FN(moe_routes));
  m.impl("_moe_start_dispatch", TORCH_FN(moe_start_dispatch));
  m.impl("_moe_start_return", TORCH_FN(moe_start_return));
  m.impl("_moe_sum", TORCH_FN(moe_sum));
  m.impl("_moe_weight_grad", TORCH_FN(choice_weight_grad));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { register_parts(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_parts(m); }

}  // namespace weft::ops
