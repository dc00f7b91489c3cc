#include "shard_shape.h"

#include <c10/util/Exception.h>

namespace weft::ops {

namespace {

// Returns whether all shards are known to have the same size. They get a formula of their own,
// because the general one would hide from torch.export that no shard of a symbolic size is empty.
bool is_even(const c10::SymInt& size, std::int64_t num_ranks) {
  return TORCH_STATICALLY_KNOWN_TRUE((size % num_ranks).sym_eq(0));
}

}  // namespace

c10::SymInt max_shard_size(const c10::SymInt& size, std::int64_t num_ranks) {
  return is_even(size, num_ranks) ? size / num_ranks : (size + (num_ranks - 1)) / num_ranks;
}

c10::SymInt shard_size(const c10::SymInt& size, const GroupRank& group_rank) {
  const auto max_size = max_shard_size(size, group_rank.num_ranks);
  if (is_even(size, group_rank.num_ranks)) {
    return max_size;
  }
  return size.min(max_size * (group_rank.rank + 1)) - size.min(max_size * group_rank.rank);
}

std::int64_t checked_dim(std::string_view op,
                         const at::Tensor& x,
                         std::int64_t dim,
                         std::string_view name) {
  TORCH_CHECK_INDEX(-x.dim() <= dim && dim < x.dim(),
                    op,
                    ": got ",
                    name,
                    " ",
                    dim,
                    " for x with ",
                    x.dim(),
                    " dims; pass one from ",
                    -x.dim(),
                    " to ",
                    x.dim() - 1,
                    " (x must have at least one dim).");
  return dim < 0 ? dim + x.dim() : dim;
}

c10::SymInt gathered_size(std::string_view op,
                          const at::Tensor& x,
                          std::int64_t dim,
                          const std::optional<c10::SymInt>& dim_size,
                          const GroupRank& group_rank,
                          std::string_view size_name,
                          std::string_view name) {
  const auto own_size = x.sym_size(dim);
  if (!dim_size.has_value()) {
    return own_size * group_rank.num_ranks;
  }
  TORCH_CHECK_VALUE(
      *dim_size >= 0 && own_size == shard_size(*dim_size, group_rank),
      op,
      ": got ",
      name,
      " of shape ",
      x.sym_sizes(),
      " on rank ",
      group_rank.rank,
      " of ",
      group_rank.num_ranks,
      " with ",
      size_name,
      " ",
      *dim_size,
      " of dim ",
      dim,
      "; pass this rank's shard, of the size that torch.chunk returns, and the full size.");
  return *dim_size;
}

c10::SymDimVector with_size(const at::Tensor& x, std::int64_t dim, const c10::SymInt& size) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes[static_cast<std::size_t>(dim)] = size;
  return sizes;
}

c10::SymDimVector scattered_shape(std::string_view op,
                                  const at::Tensor& x,
                                  std::int64_t dim,
                                  const GroupRank& group_rank) {
  dim = checked_dim(op, x, dim);
  return with_size(x, dim, shard_size(x.sym_size(dim), group_rank));
}

c10::SymDimVector gathered_shape(std::string_view op,
                                 const at::Tensor& x,
                                 std::int64_t dim,
                                 const std::optional<c10::SymInt>& dim_size,
                                 const GroupRank& group_rank) {
  dim = checked_dim(op, x, dim);
  return with_size(x, dim, gathered_size(op, x, dim, dim_size, group_rank));
}

c10::SymDimVector exchanged_shape(std::string_view op,
                                  const at::Tensor& x,
                                  std::int64_t split_dim,
                                  std::int64_t cat_dim,
                                  const std::optional<c10::SymInt>& cat_size,
                                  const GroupRank& group_rank) {
  split_dim = checked_dim(op, x, split_dim, "split_dim");
  cat_dim = checked_dim(op, x, cat_dim, "cat_dim");
  TORCH_CHECK_VALUE(split_dim != cat_dim,
                    op,
                    ": got ",
                    split_dim,
                    " as split_dim and as cat_dim; pass two different dims, or exchange rows with "
                    "torch.distributed.all_to_all_single.");
  auto sizes = with_size(x, split_dim, shard_size(x.sym_size(split_dim), group_rank));
  sizes[static_cast<std::size_t>(cat_dim)] =
      gathered_size(op, x, cat_dim, cat_size, group_rank, "cat_size");
  return sizes;
}

}  // namespace weft::ops
