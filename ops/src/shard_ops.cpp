// The conjugate pairs that shard and gather tensors: the backward of each operator is its partner.
//
//   shards                      gathers               the full tensor
//   scatter_to_group            gather_from_group     is equal on all ranks
//   reduce_scatter_to_sequence  gather_from_sequence  differs between ranks, and is summed
//   all_to_all                  all_to_all            does not exist
//
// "The full tensor" is the input of the operator that shards, and the gradient of the output of the
// one that gathers.

#include "autograd_support.h"
#include "dispatch.h"
#include "group_collectives.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>

namespace weft::ops {

namespace {

constexpr std::string_view kScatter = "weft::scatter_to_group";
constexpr std::string_view kGather = "weft::gather_from_group";
constexpr std::string_view kGatherSequence = "weft::gather_from_sequence";
constexpr std::string_view kReduceScatter = "weft::reduce_scatter_to_sequence";
constexpr std::string_view kAllToAll = "weft::all_to_all";

using OptionalSize = std::optional<c10::SymInt>;

at::Tensor scatter_to_group(const at::Tensor& x, std::int64_t dim, std::string_view group_name) {
  const auto group_rank = rank_in(kScatter, group_name);
  dim = checked_dim(kScatter, x, dim);
  const auto size = x.size(dim);
  const auto max_size = max_shard_size(size, group_rank.num_ranks).expect_int();
  return x
      .narrow(dim,
              std::min(max_size * group_rank.rank, size),
              shard_size(size, group_rank).expect_int())
      .clone(at::MemoryFormat::Contiguous);
}

at::Tensor gather(std::string_view op,
                  const at::Tensor& x,
                  std::int64_t dim,
                  std::string_view group_name,
                  const OptionalSize& dim_size) {
  const auto group = resolve_group(op, std::string(group_name));
  dim = checked_dim(op, x, dim);
  return all_gather(
      op, x, dim, gathered_size(op, x, dim, dim_size, rank_in(group)).expect_int(), group);
}

at::Tensor gather_from_group(const at::Tensor& x,
                             std::int64_t dim,
                             std::string_view group_name,
                             OptionalSize dim_size) {
  return gather(kGather, x, dim, group_name, dim_size);
}

at::Tensor gather_from_sequence(const at::Tensor& x,
                                std::int64_t dim,
                                std::string_view group_name,
                                OptionalSize dim_size) {
  return gather(kGatherSequence, x, dim, group_name, dim_size);
}

at::Tensor reduce_scatter_to_sequence(const at::Tensor& x,
                                      std::int64_t dim,
                                      std::string_view group_name) {
  const auto group = resolve_group(kReduceScatter, std::string(group_name));
  return reduce_scatter(kReduceScatter, x, checked_dim(kReduceScatter, x, dim), group);
}

at::Tensor exchange(const at::Tensor& x,
                    std::int64_t split_dim,
                    std::int64_t cat_dim,
                    std::string_view group_name,
                    OptionalSize cat_size) {
  const auto group = resolve_group(kAllToAll, std::string(group_name));
  const auto shape = exchanged_shape(kAllToAll, x, split_dim, cat_dim, cat_size, rank_in(group));
  cat_dim = checked_dim(kAllToAll, x, cat_dim, "cat_dim");
  return all_to_all(kAllToAll,
                    x,
                    checked_dim(kAllToAll, x, split_dim, "split_dim"),
                    cat_dim,
                    shape[static_cast<std::size_t>(cat_dim)].expect_int(),
                    group);
}

// State for the backward: the dims, the group, and the full size of the dim that the forward
// sharded.
void save(AutogradContext* ctx, std::int64_t dim, const std::string& group_name) {
  ctx->saved_data["dim"] = dim;
  ctx->saved_data["group_name"] = group_name;
}
std::int64_t saved_dim(AutogradContext* ctx) { return ctx->saved_data.at("dim").toInt(); }
const std::string& saved_group(AutogradContext* ctx) {
  return ctx->saved_data.at("group_name").toStringRef();
}
c10::SymInt saved_size(AutogradContext* ctx) { return ctx->saved_data.at("size").toSymInt(); }

class ScatterToGroup : public torch::autograd::Function<ScatterToGroup> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            std::int64_t dim,
                            const std::string& group_name) {
    ctx->saved_data["size"] = x.sym_size(checked_dim(kScatter, x, dim));
    save(ctx, dim, group_name);
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::scatter_to_group(x, dim, group_name);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kScatter);
    return {
        dispatch::gather_from_group(grads[0], saved_dim(ctx), saved_group(ctx), saved_size(ctx)),
        at::Tensor(),
        at::Tensor()};
  }
};

class GatherFromGroup : public torch::autograd::Function<GatherFromGroup> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            std::int64_t dim,
                            const std::string& group_name,
                            const OptionalSize& dim_size) {
    save(ctx, dim, group_name);
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::gather_from_group(x, dim, group_name, dim_size);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kGather);
    return {dispatch::scatter_to_group(grads[0], saved_dim(ctx), saved_group(ctx)),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

class GatherFromSequence : public torch::autograd::Function<GatherFromSequence> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            std::int64_t dim,
                            const std::string& group_name,
                            const OptionalSize& dim_size) {
    save(ctx, dim, group_name);
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::gather_from_sequence(x, dim, group_name, dim_size);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kGatherSequence);
    return {dispatch::reduce_scatter_to_sequence(grads[0], saved_dim(ctx), saved_group(ctx)),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

class ReduceScatterToSequence : public torch::autograd::Function<ReduceScatterToSequence> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            std::int64_t dim,
                            const std::string& group_name) {
    ctx->saved_data["size"] = x.sym_size(checked_dim(kReduceScatter, x, dim));
    save(ctx, dim, group_name);
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::reduce_scatter_to_sequence(x, dim, group_name);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kReduceScatter);
    return {
        dispatch::gather_from_sequence(grads[0], saved_dim(ctx), saved_group(ctx), saved_size(ctx)),
        at::Tensor(),
        at::Tensor()};
  }
};

class AllToAll : public torch::autograd::Function<AllToAll> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            std::int64_t split_dim,
                            std::int64_t cat_dim,
                            const std::string& group_name,
                            const OptionalSize& cat_size) {
    ctx->saved_data["size"] = x.sym_size(checked_dim(kAllToAll, x, split_dim, "split_dim"));
    ctx->saved_data["cat_dim"] = cat_dim;
    save(ctx, split_dim, group_name);
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::all_to_all(x, split_dim, cat_dim, group_name, cat_size);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    forbid_double_backward(kAllToAll);
    return {dispatch::all_to_all(grads[0],
                                 ctx->saved_data.at("cat_dim").toInt(),
                                 saved_dim(ctx),
                                 saved_group(ctx),
                                 saved_size(ctx)),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

at::Tensor scatter_to_group_autograd(const at::Tensor& x,
                                     std::int64_t dim,
                                     std::string_view group_name) {
  return ScatterToGroup::apply(x, dim, std::string(group_name));
}

at::Tensor gather_from_group_autograd(const at::Tensor& x,
                                      std::int64_t dim,
                                      std::string_view group_name,
                                      OptionalSize dim_size) {
  return GatherFromGroup::apply(x, dim, std::string(group_name), dim_size);
}

at::Tensor gather_from_sequence_autograd(const at::Tensor& x,
                                         std::int64_t dim,
                                         std::string_view group_name,
                                         OptionalSize dim_size) {
  return GatherFromSequence::apply(x, dim, std::string(group_name), dim_size);
}

at::Tensor reduce_scatter_to_sequence_autograd(const at::Tensor& x,
                                               std::int64_t dim,
                                               std::string_view group_name) {
  return ReduceScatterToSequence::apply(x, dim, std::string(group_name));
}

at::Tensor all_to_all_autograd(const at::Tensor& x,
                               std::int64_t split_dim,
                               std::int64_t cat_dim,
                               std::string_view group_name,
                               OptionalSize cat_size) {
  return AllToAll::apply(x, split_dim, cat_dim, std::string(group_name), cat_size);
}

// Returns an uninitialized tensor of this shape, with the dtype and device of `like`.
at::Tensor empty(const c10::SymDimVector& sizes, const at::Tensor& like) {
  return at::empty_symint(sizes, like.options());
}

at::Tensor scatter_to_group_meta(const at::Tensor& x,
                                 std::int64_t dim,
                                 std::string_view group_name) {
  return empty(scattered_shape(kScatter, x, dim, rank_in(kScatter, group_name)), x);
}

at::Tensor gather_from_group_meta(const at::Tensor& x,
                                  std::int64_t dim,
                                  std::string_view group_name,
                                  OptionalSize dim_size) {
  return empty(gathered_shape(kGather, x, dim, dim_size, rank_in(kGather, group_name)), x);
}

at::Tensor gather_from_sequence_meta(const at::Tensor& x,
                                     std::int64_t dim,
                                     std::string_view group_name,
                                     OptionalSize dim_size) {
  const auto group_rank = rank_in(kGatherSequence, group_name);
  return empty(gathered_shape(kGatherSequence, x, dim, dim_size, group_rank), x);
}

at::Tensor reduce_scatter_to_sequence_meta(const at::Tensor& x,
                                           std::int64_t dim,
                                           std::string_view group_name) {
  const auto group_rank = rank_in(kReduceScatter, group_name);
  return empty(scattered_shape(kReduceScatter, x, dim, group_rank), x);
}

at::Tensor all_to_all_meta(const at::Tensor& x,
                           std::int64_t split_dim,
                           std::int64_t cat_dim,
                           std::string_view group_name,
                           OptionalSize cat_size) {
  const auto group_rank = rank_in(kAllToAll, group_name);
  return empty(exchanged_shape(kAllToAll, x, split_dim, cat_dim, cat_size, group_rank), x);
}

void register_shard_kernels(torch::Library& m) {
  m.impl("scatter_to_group", TORCH_FN(scatter_to_group));
  m.impl("gather_from_group", TORCH_FN(gather_from_group));
  m.impl("gather_from_sequence", TORCH_FN(gather_from_sequence));
  m.impl("reduce_scatter_to_sequence", TORCH_FN(reduce_scatter_to_sequence));
  m.impl("all_to_all", TORCH_FN(exchange));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { register_shard_kernels(m); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { register_shard_kernels(m); }
TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("scatter_to_group", TORCH_FN(scatter_to_group_meta));
  m.impl("gather_from_group", TORCH_FN(gather_from_group_meta));
  m.impl("gather_from_sequence", TORCH_FN(gather_from_sequence_meta));
  m.impl("reduce_scatter_to_sequence", TORCH_FN(reduce_scatter_to_sequence_meta));
  m.impl("all_to_all", TORCH_FN(all_to_all_meta));
}
TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("scatter_to_group", TORCH_FN(scatter_to_group_autograd));
  m.impl("gather_from_group", TORCH_FN(gather_from_group_autograd));
  m.impl("gather_from_sequence", TORCH_FN(gather_from_sequence_autograd));
  m.impl("reduce_scatter_to_sequence", TORCH_FN(reduce_scatter_to_sequence_autograd));
  m.impl("all_to_all", TORCH_FN(all_to_all_autograd));
}

}  // namespace weft::ops
