#include "group_collectives.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace weft::ops {

namespace {

at::Tensor contiguous_copy(const at::Tensor& x) { return x.clone(at::MemoryFormat::Contiguous); }

std::int64_t max_shard_size_of(std::int64_t size, const ProcessGroupPtr& group) {
  return max_shard_size(size, group->getSize()).expect_int();
}

std::int64_t size_on(std::int64_t size, int rank, const ProcessGroupPtr& group) {
  return shard_size(size, {group->getSize(), rank}).expect_int();
}

// Whether all shards have `max_size` entries.
bool is_even(std::int64_t dim_size, std::int64_t max_size, const ProcessGroupPtr& group) {
  return dim_size == max_size * group->getSize();
}

// Returns x, whose first dim is the sharded one, padded with zeros to `size` rows.
at::Tensor pad_rows(const at::Tensor& x, std::int64_t size) {
  if (x.size(0) == size) {
    return x.contiguous();
  }
  auto sizes = x.sizes().vec();
  sizes[0] = size;
  auto result = at::zeros(sizes, x.options());
  result.narrow(0, 0, x.size(0)).copy_(x);
  return result;
}

// c10d has renamed these calls; older releases have only the names that newer ones deprecate.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
PendingCollective gather_into(std::string_view op,
                              std::string_view what,
                              const ProcessGroupPtr& group,
                              at::Tensor result,
                              at::Tensor shard,
                              bool overlaps) {
  return {op, what, group, {result, shard}, overlaps, [&](bool async_op) {
            c10d::AllgatherOptions opts;
            opts.asyncOp = async_op;
            return group->_allgather_base(result, shard, opts);
          }};
}

PendingCollective reduce_scatter_into(std::string_view op,
                                      std::string_view what,
                                      const ProcessGroupPtr& group,
                                      at::Tensor result,
                                      at::Tensor full,
                                      bool overlaps) {
  return {op, what, group, {result, full}, overlaps, [&](bool async_op) {
            c10d::ReduceScatterOptions opts;
            opts.asyncOp = async_op;
            return group->_reduce_scatter_base(result, full, opts);
          }};
}

PendingCollective exchange_into(std::string_view op,
                                const ProcessGroupPtr& group,
                                at::Tensor result,
                                at::Tensor input,
                                std::vector<std::int64_t>& result_sizes,
                                std::vector<std::int64_t>& input_sizes,
                                bool overlaps = false) {
  return {op, "all-to-all", group, {result, input}, overlaps, [&](bool async_op) {
            c10d::AllToAllOptions opts;
            opts.asyncOp = async_op;
            return group->alltoall_base(result, input, result_sizes, input_sizes, opts);
          }};
}
#pragma GCC diagnostic pop

// The first dim of x is the sharded one; x is padded to `num_rows`.
std::pair<at::Tensor, PendingCollective> gather_rows(std::string_view op,
                                                     std::string_view what,
                                                     const at::Tensor& x,
                                                     std::int64_t num_rows,
                                                     const ProcessGroupPtr& group,
                                                     bool overlaps) {
  auto shard = pad_rows(x, num_rows);
  auto sizes = shard.sizes().vec();
  sizes[0] = num_rows * group->getSize();
  auto result = at::empty(sizes, x.options());
  PendingCollective work;
  if (result.numel() > 0) {
    work = gather_into(op, what, group, result, std::move(shard), overlaps);
  }
  return {std::move(result), std::move(work)};
}

PendingTensor gather(std::string_view op,
                     const at::Tensor& x,
                     std::int64_t dim,
                     std::int64_t dim_size,
                     const ProcessGroupPtr& group,
                     bool overlaps) {
  if (!group) {
    return PendingTensor(contiguous_copy(x));
  }
  const auto max_size = max_shard_size_of(dim_size, group);
  if (is_even(dim_size, max_size, group)) {
    // Gather the shards in their own layout, one after another: only the result is copied, and only
    // if dim is not 0.
    auto sizes = x.sizes().vec();
    sizes.insert(sizes.begin(), group->getSize());
    auto stacked = at::empty(sizes, x.options());
    PendingCollective work;
    if (stacked.numel() > 0) {
      // Gloo requires as many dims in the result as in the shard.
      work = gather_into(op, "all-gather", group, stacked.flatten(0, 1), x.contiguous(), overlaps);
    }
    return PendingTensor::of_stacked_shards(std::move(work), std::move(stacked), dim);
  }
  auto [result, work] = gather_rows(op, "all-gather", x.movedim(dim, 0), max_size, group, overlaps);
  // Only the last shards are shorter, so all padding is behind the first dim_size rows.
  return PendingTensor::of_rows(std::move(work), std::move(result), dim_size, dim);
}

PendingTensor sum_and_scatter(std::string_view op,
                              const at::Tensor& x,
                              std::int64_t dim,
                              const ProcessGroupPtr& group,
                              bool overlaps) {
  if (!group) {
    return PendingTensor(contiguous_copy(x));
  }
  const auto max_size = max_shard_size_of(x.size(dim), group);
  PendingCollective work;
  if (is_even(x.size(dim), max_size, group)) {
    // Arrange the shards in their own layout, one after another: only the input is copied, and only
    // if dim is not 0.
    auto full = x.unflatten(dim, {group->getSize(), max_size}).movedim(dim, 0).contiguous();
    auto result = at::empty(full.sizes().slice(1), x.options());
    if (result.numel() > 0) {
      work = reduce_scatter_into(op, "reduce-scatter", group, result, full.flatten(0, 1), overlaps);
    }
    const auto num_rows = result.size(0);
    return PendingTensor::of_rows(std::move(work), std::move(result), num_rows, 0);
  }
  auto full = pad_rows(x.movedim(dim, 0), max_size * group->getSize());
  auto sizes = full.sizes().vec();
  sizes[0] = max_size;
  auto result = at::empty(sizes, x.options());
  if (result.numel() > 0) {
    work = reduce_scatter_into(op, "reduce-scatter", group, result, std::move(full), overlaps);
  }
  const auto size = size_on(x.size(dim), group->getRank(), group);
  return PendingTensor::of_rows(std::move(work), std::move(result), size, dim);
}

}  // namespace

GroupRank rank_in(const ProcessGroupPtr& group) {
  return group ? GroupRank{group->getSize(), group->getRank()} : GroupRank{};
}

GroupRank rank_in(std::string_view op, std::string_view group_name) {
  return rank_in(resolve_group(op, std::string(group_name)));
}

PendingTensor::PendingTensor(at::Tensor result) : result_(std::move(result)) {}

PendingTensor PendingTensor::of_rows(PendingCollective work,
                                     at::Tensor rows,
                                     std::int64_t size,
                                     std::int64_t dim) {
  PendingTensor pending(rows.narrow(0, 0, size).movedim(0, dim));
  pending.work_ = std::move(work);
  return pending;
}

PendingTensor PendingTensor::of_stacked_shards(PendingCollective work,
                                               at::Tensor shards,
                                               std::int64_t dim) {
  PendingTensor pending(shards.movedim(0, dim));
  pending.work_ = std::move(work);
  pending.flattened_dim_ = dim;
  return pending;
}

at::Tensor PendingTensor::get() {
  work_.wait();
  auto result = std::move(result_);
  if (flattened_dim_.has_value()) {
    result = result.flatten(*flattened_dim_, *flattened_dim_ + 1);
  }
  return result.contiguous();
}

at::Tensor all_gather(std::string_view op,
                      const at::Tensor& x,
                      std::int64_t dim,
                      std::int64_t dim_size,
                      const ProcessGroupPtr& group) {
  return gather(op, x, dim, dim_size, group, /*overlaps=*/false).get();
}

PendingTensor start_all_gather(std::string_view op,
                               const at::Tensor& x,
                               std::int64_t dim,
                               std::int64_t dim_size,
                               const ProcessGroupPtr& group,
                               bool overlaps) {
  return gather(op, x, dim, dim_size, group, overlaps);
}

std::pair<at::Tensor, PendingCollective> start_gather_rows(std::string_view op,
                                                           std::string_view what,
                                                           const at::Tensor& x,
                                                           std::int64_t num_rows,
                                                           const ProcessGroupPtr& group,
                                                           bool overlaps) {
  return gather_rows(op, what, x, num_rows, group, overlaps);
}

PendingCollective start_scatter_rows(std::string_view op,
                                     std::string_view what,
                                     const at::Tensor& full,
                                     const at::Tensor& result,
                                     const ProcessGroupPtr& group,
                                     bool overlaps) {
  return reduce_scatter_into(op, what, group, result, full, overlaps);
}

at::Tensor reduce_scatter(std::string_view op,
                          const at::Tensor& x,
                          std::int64_t dim,
                          const ProcessGroupPtr& group) {
  return sum_and_scatter(op, x, dim, group, /*overlaps=*/false).get();
}

PendingTensor start_reduce_scatter(std::string_view op,
                                   const at::Tensor& x,
                                   std::int64_t dim,
                                   const ProcessGroupPtr& group,
                                   bool overlaps) {
  return sum_and_scatter(op, x, dim, group, overlaps);
}

PendingCollective start_broadcast(std::string_view op,
                                  const at::Tensor& tensor,
                                  int root,
                                  const ProcessGroupPtr& group,
                                  bool overlaps) {
  if (tensor.numel() == 0) {
    return {};
  }
  return {op, "broadcast", group, {tensor}, overlaps, [&](bool async_op) {
            std::vector<at::Tensor> tensors{tensor};
            c10d::BroadcastOptions opts;
            opts.rootRank = root;
            opts.asyncOp = async_op;
            return group->broadcast(tensors, opts);
          }};
}

PendingCollective start_reduce(std::string_view op,
                               const at::Tensor& tensor,
                               int root,
                               const ProcessGroupPtr& group,
                               bool overlaps) {
  if (tensor.numel() == 0) {
    return {};
  }
  return {op, "reduce", group, {tensor}, overlaps, [&](bool async_op) {
            std::vector<at::Tensor> tensors{tensor};
            c10d::ReduceOptions opts;
            opts.rootRank = root;
            opts.asyncOp = async_op;
            return group->reduce(tensors, opts);
          }};
}

PendingExchange start_exchange(std::string_view op,
                               const ExchangedTensors& tensors,
                               const ProcessGroupPtr& group) {
  const auto send = [&](bool /*async_op*/) {
    std::vector<at::Tensor> one{tensors.sent};
    return group->send(one, tensors.destination, tensors.tag);
  };
  const auto receive = [&](bool /*async_op*/) {
    std::vector<at::Tensor> one{tensors.received};
    return group->recv(one, tensors.source, tensors.tag);
  };
  const bool sends = tensors.sent.numel() > 0, receives = tensors.received.numel() > 0;
  const auto device = tensors.sent.device().type();
  if (const auto backend = group->getBackend(device); backend->supportsCoalescing()) {
    // NCCL runs one message between two ranks at a time: two ranks that both send first, or both
    // receive first, would wait for each other. Empty messages are sent, too, as the first batch
    // connects all ranks of the group and waits for each of them.
    std::vector<at::Tensor> in_flight{tensors.sent, tensors.received};
    const auto start = [&](bool async_op) {
      CoalescedBatch batch(backend);
      receive(async_op);
      send(async_op);
      return batch.end();
    };
    return {{op, "send and receive", group, std::move(in_flight), /*overlaps=*/true, start}, {}};
  }
  PendingExchange result;
  if (receives) {
    result.receiving = {op, "receive", group, {tensors.received}, /*overlaps=*/true, receive};
  }
  if (sends) {
    result.sending = {op, "send", group, {tensors.sent}, /*overlaps=*/true, send};
  }
  return result;
}

at::Tensor all_to_all(std::string_view op,
                      const at::Tensor& x,
                      std::int64_t split_dim,
                      std::int64_t cat_dim,
                      std::int64_t cat_size,
                      const ProcessGroupPtr& group) {
  if (!group) {
    return contiguous_copy(x);
  }
  // With the split dim in front, the rows for each rank and from each rank are contiguous.
  auto input = x.movedim(split_dim, 0).contiguous();
  const auto cat_idx = cat_dim < split_dim ? cat_dim + 1 : cat_dim;
  const auto own_rows = size_on(x.size(split_dim), group->getRank(), group);
  // The number of elements per entry of the split dim, if the cat dim has `cat_shard_size` entries.
  const auto row_numel = [&](std::int64_t cat_shard_size) {
    std::int64_t numel = cat_shard_size;
    for (std::int64_t each = 1; each < input.dim(); ++each) {
      numel *= each == cat_idx ? 1 : input.size(each);
    }
    return numel;
  };
  std::vector<std::int64_t> input_sizes, result_sizes;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    input_sizes.push_back(size_on(x.size(split_dim), rank, group) * row_numel(x.size(cat_dim)));
    result_sizes.push_back(own_rows * row_numel(size_on(cat_size, rank, group)));
  }
  auto flat = at::empty({own_rows * row_numel(cat_size)}, x.options());
  if (x.size(split_dim) * row_numel(cat_size) > 0) {
    exchange_into(op, group, flat, input.view({-1}), result_sizes, input_sizes).wait();
  }
  std::vector<at::Tensor> shards;
  auto sizes = input.sizes().vec();
  sizes[0] = own_rows;
  std::int64_t begin = 0;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    const auto numel = result_sizes[static_cast<std::size_t>(rank)];
    sizes[static_cast<std::size_t>(cat_idx)] = size_on(cat_size, rank, group);
    shards.push_back(flat.narrow(0, begin, numel).view(sizes));
    begin += numel;
  }
  return at::cat(shards, cat_idx).movedim(0, split_dim).contiguous();
}

std::pair<at::Tensor, PendingCollective> start_to_exchange_rows(
    std::string_view op,
    at::Tensor rows,
    const std::vector<std::int64_t>& sent,
    const std::vector<std::int64_t>& received,
    const ProcessGroupPtr& group,
    bool overlaps) {
  if (!group) {
    return {std::move(rows), PendingCollective()};
  }
  const auto num_features = rows.size(1);
  const auto num_received = std::accumulate(received.begin(), received.end(), std::int64_t{0});
  // Zeros in place of a message that a backend does not deliver, as torch's fake one.
  auto result = rows.is_floating_point() ? at::empty({num_received, num_features}, rows.options())
                                         : at::zeros({num_received, num_features}, rows.options());
  if (num_features == 0) {
    return {std::move(result), PendingCollective()};
  }
  std::vector<std::int64_t> result_sizes, input_sizes;
  for (const auto num_rows : received) {
    result_sizes.push_back(num_rows * num_features);
  }
  for (const auto num_rows : sent) {
    input_sizes.push_back(num_rows * num_features);
  }
  const auto input = rows.contiguous().view({-1});
  auto work =
      exchange_into(op, group, result.view({-1}), input, result_sizes, input_sizes, overlaps);
  return {std::move(result), std::move(work)};
}

at::Tensor exchange_rows(std::string_view op,
                         at::Tensor rows,
                         const std::vector<std::int64_t>& sent,
                         const std::vector<std::int64_t>& received,
                         const ProcessGroupPtr& group) {
  auto [result, work] =
      start_to_exchange_rows(op, std::move(rows), sent, received, group, /*overlaps=*/false);
  work.wait();
  return std::move(result);
}

}  // namespace weft::ops
