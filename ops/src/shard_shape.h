#pragma once

// How a dim is cut over a group, and the shape functions of the operators that move its parts.
//
// Parts are those of torch.chunk, as DTensor's Shard has them: ceil(size / ranks) long, the later
// ones shorter or empty.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace weft::ops {

// A rank of a group; {1, 0} is the group of one.
struct GroupPlace {
  std::int64_t num_ranks = 1;
  std::int64_t rank = 0;
};

// The length of the longest part.
c10::SymInt part_length(const c10::SymInt& size, std::int64_t num_ranks);
// The length of a rank's part.
c10::SymInt part_size(const c10::SymInt& size, const GroupPlace& place);

// `dim` counted from 0. Errors: IndexError where x has no such dim.
std::int64_t checked_dim(std::string_view op,
                         const at::Tensor& x,
                         std::int64_t dim,
                         std::string_view name = "dim");

// The size of a dim of which `x` is this rank's part: `dim_size`, or where that is not told, as if
// all ranks had as much. Errors: ValueError where x is not the part that belongs to the rank.
c10::SymInt gathered_size(std::string_view op,
                          const at::Tensor& x,
                          std::int64_t dim,
                          const std::optional<c10::SymInt>& dim_size,
                          const GroupPlace& place,
                          std::string_view size_name = "dim_size",
                          std::string_view name = "x");

// The shape of x with another size at `dim`. REQUIRES: dim counted from 0.
c10::SymDimVector with_size(const at::Tensor& x, std::int64_t dim, const c10::SymInt& size);

// x with its part along `dim` alone.
c10::SymDimVector scattered_shape(std::string_view op,
                                  const at::Tensor& x,
                                  std::int64_t dim,
                                  const GroupPlace& place);

// x with all parts along `dim`.
c10::SymDimVector gathered_shape(std::string_view op,
                                 const at::Tensor& x,
                                 std::int64_t dim,
                                 const std::optional<c10::SymInt>& dim_size,
                                 const GroupPlace& place);

// x with its part along `split_dim` and all parts along `cat_dim`.
c10::SymDimVector exchanged_shape(std::string_view op,
                                  const at::Tensor& x,
                                  std::int64_t split_dim,
                                  std::int64_t cat_dim,
                                  const std::optional<c10::SymInt>& cat_size,
                                  const GroupPlace& place);

}  // namespace weft::ops
