#include "expert_rows.h"

#include "group_collectives.h"
#include "shard_shape.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace weft::ops {

namespace {

at::TensorOptions cpu_counts() { return at::TensorOptions().dtype(at::kLong).device(at::kCPU); }

// The smallest and the largest expert id of a rank precede its counts in the message.
constexpr std::int64_t kNumBounds = 2;

std::vector<std::int64_t> values_of(const at::Tensor& counts) {
  const auto host = counts.cpu().contiguous();
  const auto* begin = host.const_data_ptr<std::int64_t>();
  return {begin, begin + host.numel()};
}

// Returns `counts` on the CPU; from CUDA in pinned memory, which can be copied back without
// waiting.
at::Tensor read(const at::Tensor& counts) {
  auto host = at::empty(counts.sizes(), cpu_counts().pinned_memory(counts.is_cuda()));
  return host.copy_(counts);
}

// Returns what `exchange_counts` finds if every rank has as many pairs as this one, and chooses all
// experts equally often.
std::pair<at::Tensor, at::Tensor> balanced_counts(std::int64_t num_pairs,
                                                  std::int64_t num_experts,
                                                  const GroupRank& group_rank) {
  auto sent = at::empty({group_rank.num_ranks}, cpu_counts());
  const auto num_own = shard_size(num_experts, group_rank).expect_int();
  auto received = at::empty({group_rank.num_ranks, num_own}, cpu_counts());
  std::int64_t expert = 0;
  for (std::int64_t rank = 0; rank < group_rank.num_ranks; ++rank) {
    const auto num_of_rank = shard_size(num_experts, {group_rank.num_ranks, rank}).expect_int();
    std::int64_t num_sent = 0;
    for (std::int64_t own = 0; own < num_of_rank; ++own, ++expert) {
      const auto count = num_pairs / num_experts + (expert < num_pairs % num_experts ? 1 : 0);
      num_sent += count;
      if (rank == group_rank.rank) {
        received.select(1, own).fill_(count);
      }
    }
    sent.mutable_data_ptr<std::int64_t>()[rank] = num_sent;
  }
  return {sent, received};
}

void check_bounds(std::string_view op, const at::Tensor& bounds, std::int64_t num_experts) {
  const auto values = values_of(bounds);
  for (std::size_t rank = 0; rank < values.size() / kNumBounds; ++rank) {
    const auto lowest = values[kNumBounds * rank], highest = values[kNumBounds * rank + 1];
    TORCH_CHECK_INDEX(lowest >= 0 && highest < num_experts,
                      op,
                      ": got expert_ids from ",
                      lowest,
                      " to ",
                      highest,
                      " on rank ",
                      rank,
                      "; pass ids from 0 to num_experts - 1 = ",
                      num_experts - 1,
                      ".");
  }
}

// Returns the positions of rows that are sorted by (row, column) of `lengths` in the order (column,
// row). lengths[i, j] on the CPU is the number of rows of (i, j).
at::Tensor transposed_order(const at::Tensor& lengths,
                            std::int64_t num_rows,
                            const at::Tensor& like) {
  const auto sizes = lengths.to(like.device(), /*non_blocking=*/true);
  const auto begins = (sizes.flatten().cumsum(0) - sizes.flatten()).view(sizes.sizes());
  const auto sizes_after = sizes.t().flatten();
  const auto begins_after = sizes_after.cumsum(0) - sizes_after;
  const auto shifts = begins.t().flatten() - begins_after;
  return at::repeat_interleave(shifts, sizes_after, std::nullopt, num_rows) +
         at::arange(num_rows, shifts.options());
}

// Whether rows that are sorted by the row and column of `lengths` are sorted by column and row,
// too.
bool is_transposed(const at::Tensor& lengths) {
  return lengths.size(0) <= 1 || lengths.size(1) <= 1;
}

// Returns the position of each pair among the sorted pairs, [tokens, k].
at::Tensor positions_of_pairs(const at::Tensor& order, std::int64_t num_tokens) {
  auto positions = at::empty_like(order, at::MemoryFormat::Contiguous);
  positions.scatter_(0, order, at::arange(order.numel(), order.options()));
  return positions.view({num_tokens, order.numel() / num_tokens});
}

at::ScalarType sum_dtype(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace

std::vector<CountedRoutes> exchange_counts(std::string_view op,
                                           const std::vector<at::Tensor>& expert_ids,
                                           std::int64_t num_experts,
                                           const ProcessGroupPtr& group) {
  const auto group_rank = rank_in(group);
  const auto num_ranks = group_rank.num_ranks;
  const auto num_own = shard_size(num_experts, group_rank).expect_int();
  const auto max_own = max_shard_size(num_experts, num_ranks).expect_int();

  std::vector<CountedRoutes> result;
  std::vector<at::Tensor> messages, num_sent;
  for (const auto& ids_of_chunk : expert_ids) {
    const auto num_pairs = ids_of_chunk.numel();
    auto [ids, order] = ids_of_chunk.flatten().to(at::kLong).sort(/*stable=*/true, 0, false);
    // Each step is asynchronous on CUDA, unlike bincount.
    const auto ends = at::searchsorted(ids,
                                       at::arange(num_experts, ids.options()),
                                       /*out_int32=*/false,
                                       /*right=*/true);
    const auto of_experts = at::diff(ends, 1, 0, at::zeros({1}, ends.options()));
    const auto of_ranks = at::constant_pad_nd(of_experts, {0, num_ranks * max_own - num_experts})
                              .view({num_ranks, max_own});
    const auto bounds = num_pairs > 0 ? at::stack({ids.select(0, 0), ids.select(0, num_pairs - 1)})
                                      : at::zeros({kNumBounds}, ids.options());
    messages.push_back(bounds.expand({num_ranks, kNumBounds}));
    messages.push_back(of_ranks);
    num_sent.push_back(of_ranks.sum(1, /*keepdim=*/true));
    result.push_back({{std::move(order), {}, {}}, {}});
  }
  const std::vector<std::int64_t> ones(static_cast<std::size_t>(num_ranks), 1);
  const auto from_ranks = exchange_rows(op, at::cat(messages, 1), ones, ones, group);
  if (is_dry_run()) {
    for (std::size_t chunk = 0; chunk < result.size(); ++chunk) {
      auto& [routes, counts] = result[chunk];
      std::tie(routes.sent, routes.received) =
          balanced_counts(expert_ids[chunk].numel(), num_experts, group_rank);
      counts = routes.received.sum(0).to(expert_ids[chunk].device());
    }
    return result;
  }
  num_sent.insert(num_sent.begin(), from_ranks);
  const auto host = read(at::cat(num_sent, 1));
  const auto width = kNumBounds + max_own;
  for (std::size_t chunk = 0; chunk < result.size(); ++chunk) {
    auto& [routes, counts] = result[chunk];
    const auto begin = static_cast<std::int64_t>(chunk) * width;
    check_bounds(op, host.narrow(1, begin, kNumBounds), num_experts);
    // `received` stays in pinned memory.
    routes.received =
        at::empty({num_ranks, num_own}, cpu_counts().pinned_memory(expert_ids[chunk].is_cuda()));
    routes.received.copy_(host.narrow(1, begin + kNumBounds, num_own));
    routes.sent = host.select(1, from_ranks.size(1) + static_cast<std::int64_t>(chunk)).clone();
    counts = from_ranks.narrow(1, begin + kNumBounds, num_own).sum(0);
  }
  return result;
}

at::Tensor PendingExpertRows::get() {
  work_.wait();
  auto rows = std::exchange(rows_, {});
  return received_.defined() ? rows.index_select(0, transposed_order(received_, rows.size(0), rows))
                             : rows;
}

PendingExpertRows start_to_experts(std::string_view op,
                                   at::Tensor rows,
                                   const ExpertRoutes& routes,
                                   const ProcessGroupPtr& group,
                                   bool overlaps) {
  if (!group) {
    return PendingExpertRows(std::move(rows));
  }
  const auto received = values_of(routes.received.sum(1));
  auto [result, work] = start_to_exchange_rows(
      op, std::move(rows), values_of(routes.sent), received, group, overlaps);
  return {std::move(result),
          std::move(work),
          is_transposed(routes.received) ? at::Tensor() : routes.received};
}

PendingExpertRows start_from_experts(std::string_view op,
                                     const at::Tensor& rows,
                                     const ExpertRoutes& routes,
                                     const ProcessGroupPtr& group,
                                     bool overlaps) {
  if (!group) {
    return PendingExpertRows(rows);
  }
  auto by_rank =
      is_transposed(routes.received)
          ? rows
          : rows.index_select(0, transposed_order(routes.received.t(), rows.size(0), rows));
  const auto received = values_of(routes.received.sum(1));
  auto [result, work] = start_to_exchange_rows(
      op, std::move(by_rank), received, values_of(routes.sent), group, overlaps);
  return {std::move(result), std::move(work)};
}

at::Tensor send_to_experts(std::string_view op,
                           at::Tensor rows,
                           const ExpertRoutes& routes,
                           const ProcessGroupPtr& group) {
  return start_to_experts(op, std::move(rows), routes, group, /*overlaps=*/false).get();
}

at::Tensor return_from_experts(std::string_view op,
                               const at::Tensor& rows,
                               const ExpertRoutes& routes,
                               const ProcessGroupPtr& group) {
  return start_from_experts(op, rows, routes, group, /*overlaps=*/false).get();
}

at::Tensor tokens_of_pairs(const at::Tensor& order, std::int64_t num_tokens) {
  const auto num_pairs = order.numel();
  return num_pairs == 0 ? order : order.div(num_pairs / num_tokens, "floor");
}

at::Tensor sum_over_choices(const at::Tensor& rows,
                            const at::Tensor& order,
                            std::int64_t num_tokens,
                            const at::Tensor& weights) {
  const auto dtype = sum_dtype(rows);
  auto sum = at::zeros({num_tokens, rows.size(1)}, rows.options().dtype(dtype));
  if (order.numel() > 0) {
    const auto positions = positions_of_pairs(order, num_tokens);
    for (std::int64_t choice = 0; choice < positions.size(1); ++choice) {
      const auto chosen = rows.index_select(0, positions.select(1, choice));
      if (weights.defined()) {
        sum.addcmul_(chosen.to(dtype), weights.narrow(1, choice, 1).to(dtype));
      } else {
        sum.add_(chosen);
      }
    }
  }
  return sum.to(rows.scalar_type());
}

at::Tensor choice_weight_grad(const at::Tensor& grad_y,
                              const at::Tensor& rows,
                              const at::Tensor& order,
                              const at::Tensor& weights) {
  const auto dtype = sum_dtype(rows);
  auto result = at::zeros(weights.sizes(), weights.options());
  if (order.numel() > 0) {
    const auto positions = positions_of_pairs(order, weights.size(0));
    for (std::int64_t choice = 0; choice < positions.size(1); ++choice) {
      const auto chosen = rows.index_select(0, positions.select(1, choice));
      result.select(1, choice).copy_(chosen.to(dtype).mul_(grad_y).sum(1));
    }
  }
  return result;
}

std::vector<std::int64_t> host_counts(const at::Tensor& counts, std::int64_t total) {
  if (!is_dry_run() || !counts.key_set().has(c10::DispatchKey::Python)) {
    return values_of(counts);
  }
  std::vector<std::int64_t> result;
  const auto num_counts = counts.numel();
  for (std::int64_t each = 0; each < num_counts; ++each) {
    result.push_back(total / num_counts + (each < total % num_counts ? 1 : 0));
  }
  return result;
}

}  // namespace weft::ops
