#include "shard_shape.h"

#include <c10/util/Exception.h>

namespace weft::ops {

namespace {

// With symbolic sizes, the general formulas would hide from an exported program that no shard is
// empty.
bool is_cut_evenly(const c10::SymInt& size, std::int64_t num_ranks) {
  return TORCH_STATICALLY_KNOWN_TRUE((size % num_ranks).sym_eq(0));
}

}  // namespace

c10::SymInt part_length(const c10::SymInt& size, std::int64_t num_ranks) {
  return is_cut_evenly(size, num_ranks) ? size / num_ranks : (size + (num_ranks - 1)) / num_ranks;
}

c10::SymInt part_size(const c10::SymInt& size, const GroupPlace& place) {
  const auto length = part_length(size, place.num_ranks);
  if (is_cut_evenly(size, place.num_ranks)) {
    return length;
  }
  return size.min(length * (place.rank + 1)) - size.min(length * place.rank);
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
                    ", for an x with dims.");
  return dim < 0 ? dim + x.dim() : dim;
}

c10::SymInt gathered_size(std::string_view op,
                          const at::Tensor& x,
                          std::int64_t dim,
                          const std::optional<c10::SymInt>& dim_size,
                          const GroupPlace& place,
                          std::string_view size_name,
                          std::string_view name) {
  const auto here = x.sym_size(dim);
  if (!dim_size.has_value()) {
    return here * place.num_ranks;
  }
  TORCH_CHECK_VALUE(*dim_size >= 0 && here == part_size(*dim_size, place),
                    op,
                    ": got ",
                    name,
                    " of shape ",
                    x.sym_sizes(),
                    " on rank ",
                    place.rank,
                    " of ",
                    place.num_ranks,
                    " with ",
                    size_name,
                    " ",
                    *dim_size,
                    " of dim ",
                    dim,
                    "; pass the part that torch.chunk gives this rank, and the size of all parts.");
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
                                  const GroupPlace& place) {
  dim = checked_dim(op, x, dim);
  return with_size(x, dim, part_size(x.sym_size(dim), place));
}

c10::SymDimVector gathered_shape(std::string_view op,
                                 const at::Tensor& x,
                                 std::int64_t dim,
                                 const std::optional<c10::SymInt>& dim_size,
                                 const GroupPlace& place) {
  dim = checked_dim(op, x, dim);
  return with_size(x, dim, gathered_size(op, x, dim, dim_size, place));
}

c10::SymDimVector exchanged_shape(std::string_view op,
                                  const at::Tensor& x,
                                  std::int64_t split_dim,
                                  std::int64_t cat_dim,
                                  const std::optional<c10::SymInt>& cat_size,
                                  const GroupPlace& place) {
  split_dim = checked_dim(op, x, split_dim, "split_dim");
  cat_dim = checked_dim(op, x, cat_dim, "cat_dim");
  TORCH_CHECK_VALUE(split_dim != cat_dim,
                    op,
                    ": got ",
                    split_dim,
                    " as split_dim and as cat_dim; pass two dims, or exchange rows with "
                    "torch.distributed.all_to_all_single.");
  auto sizes = with_size(x, split_dim, part_size(x.sym_size(split_dim), place));
  sizes[static_cast<std::size_t>(cat_dim)] =
      gathered_size(op, x, cat_dim, cat_size, place, "cat_size");
  return sizes;
}

}  // namespace weft::ops
