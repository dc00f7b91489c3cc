// Dropout by position in the full tensor: with equal seeds, the ranks of a sharded tensor drop the
// elements that an unsharded call drops. The mask is not saved; the backward generates it again.

#include "autograd_support.h"
#include "dispatch.h"
#include "group_collectives.h"
#include "shape.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>

namespace weft::ops {

namespace {

constexpr std::string_view kDropout = "weft::dropout";

using OptionalDim = std::optional<std::int64_t>;
using OptionalSize = std::optional<c10::SymInt>;

void check_dropout(const at::Tensor& x, const at::Tensor& seed, double p) {
  check_floating(kDropout, x, "x");
  TORCH_CHECK_TYPE(seed.scalar_type() == at::kLong && seed.sym_numel() == 1,
                   kDropout,
                   ": got seed of dtype ",
                   seed.scalar_type(),
                   " and shape ",
                   seed.sym_sizes(),
                   "; pass one int64, the same on all ranks of the group.");
  TORCH_CHECK_VALUE(
      p >= 0 && p <= 1, kDropout, ": got p ", p, "; pass a probability, from 0 to 1.");
}

// Checks all arguments except the seed's device. Returns the full size of the sharded dim; if `dim`
// is not given, x's number of elements.
c10::SymInt checked_size(const at::Tensor& x,
                         const at::Tensor& seed,
                         double p,
                         const OptionalDim& dim,
                         const OptionalSize& dim_size,
                         const GroupRank& group_rank) {
  check_dropout(x, seed, p);
  if (dim.has_value()) {
    return gathered_size(kDropout, x, checked_dim(kDropout, x, *dim), dim_size, group_rank);
  }
  TORCH_CHECK_VALUE(!dim_size.has_value(),
                    kDropout,
                    ": got dim_size ",
                    *dim_size,
                    " without dim; pass the dim that is sharded over the group, too.");
  return x.sym_numel();
}

at::Tensor dropout(const at::Tensor& x,
                   const at::Tensor& seed,
                   double p,
                   std::string_view group_name,
                   OptionalDim dim,
                   OptionalSize dim_size) {
  const auto group_rank = rank_in(kDropout, group_name);
  const auto full_size = checked_size(x, seed, p, dim, dim_size, group_rank).expect_int();
  TORCH_CHECK_VALUE(seed.is_cpu(),
                    kDropout,
                    ": got seed on ",
                    seed.device(),
                    "; pass it on the CPU, where it is read without waiting for the device.");
  const auto seed_value = seed.item().toLong();
  if (!dim.has_value()) {
    return dispatch::dropout_of_shard(x, seed_value, p, 1, full_size, 0, full_size);
  }
  const auto sharded_dim = checked_dim(kDropout, x, *dim);
  const auto begin = std::min(
      group_rank.rank * max_shard_size(full_size, group_rank.num_ranks).expect_int(), full_size);
  const auto inner =
      c10::multiply_integers(x.sizes().slice(static_cast<std::size_t>(sharded_dim) + 1));
  return dispatch::dropout_of_shard(x, seed_value, p, inner, x.size(sharded_dim), begin, full_size);
}

at::Tensor dropout_meta(const at::Tensor& x,
                        const at::Tensor& seed,
                        double p,
                        std::string_view group_name,
                        OptionalDim dim,
                        OptionalSize dim_size) {
  checked_size(x, seed, p, dim, dim_size, rank_in(kDropout, group_name));
  TORCH_CHECK_VALUE(x.is_meta() || !seed.is_meta(),
                    kDropout,
                    ": got seed on meta with x on ",
                    x.device(),
                    "; pass it on the CPU.");
  return at::empty_symint(x.sym_sizes(), x.options());
}

at::Tensor dropout_of_shard_meta(const at::Tensor& x,
                                 std::int64_t /*seed*/,
                                 double /*p*/,
                                 std::int64_t /*inner*/,
                                 std::int64_t /*size*/,
                                 std::int64_t /*begin*/,
                                 std::int64_t /*full_size*/) {
  return at::empty_symint(x.sym_sizes(), x.options());
}

// Linear in x: the backward is the same operator, which supports derivatives of every order.
class Dropout : public torch::autograd::Function<Dropout> {
 public:
  static at::Tensor forward(AutogradContext* ctx,
                            const at::Tensor& x,
                            const at::Tensor& seed,
                            double p,
                            const std::string& group_name,
                            const OptionalDim& dim,
                            const OptionalSize& dim_size) {
    ctx->save_for_backward({seed});
    ctx->saved_data["p"] = p;
    ctx->saved_data["group_name"] = group_name;
    ctx->saved_data["dim"] = dim;
    if (dim_size.has_value()) {
      ctx->saved_data["dim_size"] = *dim_size;
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    return dispatch::dropout(x, seed, p, group_name, dim, dim_size);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto& saved = ctx->saved_data;
    const auto dim_size = saved.find("dim_size");
    variable_list result(6);
    result[0] = dispatch::dropout(
        grads[0],
        ctx->get_saved_variables()[0],
        saved.at("p").toDouble(),
        saved.at("group_name").toStringRef(),
        saved.at("dim").toOptional<std::int64_t>(),
        dim_size == saved.end() ? OptionalSize() : OptionalSize(dim_size->second.toSymInt()));
    return result;
  }
};

at::Tensor dropout_autograd(const at::Tensor& x,
                            const at::Tensor& seed,
                            double p,
                            std::string_view group_name,
                            OptionalDim dim,
                            OptionalSize dim_size) {
  return Dropout::apply(x, seed, p, std::string(group_name), dim, dim_size);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) { m.impl("dropout", TORCH_FN(dropout)); }
TORCH_LIBRARY_IMPL(weft, CUDA, m) { m.impl("dropout", TORCH_FN(dropout)); }
TORCH_LIBRARY_IMPL(weft, Meta, m) {
  m.impl("dropout", TORCH_FN(dropout_meta));
  m.impl("_dropout_of_shard", TORCH_FN(dropout_of_shard_meta));
}
TORCH_LIBRARY_IMPL(weft, Autograd, m) { m.impl("dropout", TORCH_FN(dropout_autograd)); }

}  // namespace weft::ops
