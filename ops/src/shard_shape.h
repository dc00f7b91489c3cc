#pragma once

// How a dim is sharded over a group, and the shape functions of the operators that shard and gather
// it.
//
// Shards have the sizes of torch.chunk, as with DTensor's Shard: ceil(size / ranks), the last ones
// shorter or empty.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace weft::ops {

// A rank of a group; {1, 0} is the group of one.
struct GroupRank {
  std::int64_t num_ranks = 1;
  std::int64_t rank = 0;
};

// Returns the size of the largest shard of a dim of the full size `size`.
c10::SymInt max_shard_size(const c10::SymInt& size, std::int64_t num_ranks);
// Returns the size of a rank's shard.
c10::SymInt shard_size(const c10::SymInt& size, const GroupRank& group_rank);

// Returns `dim` counted from 0. Errors: IndexError if x has no such dim.
std::int64_t checked_dim(std::string_view op,
                         const at::Tensor& x,
                         std::int64_t dim,
                         std::string_view name = "dim");

// Returns the full size of a dim of which `x` is this rank's shard: `dim_size`, by default x's size
// times the number of ranks. Errors: ValueError if x's size is not that of this rank's shard,
// naming the arguments `name` and `size_name`.
c10::SymInt gathered_size(std::string_view op,
                          const at::Tensor& x,
                          std::int64_t dim,
                          const std::optional<c10::SymInt>& dim_size,
                          const GroupRank& group_rank,
                          std::string_view size_name = "dim_size",
                          std::string_view name = "x");

// Returns the shape of x with another size at `dim`. REQUIRES: dim counted from 0.
c10::SymDimVector with_size(const at::Tensor& x, std::int64_t dim, const c10::SymInt& size);

// Returns the shape of this rank's shard of x along `dim`.
c10::SymDimVector scattered_shape(std::string_view op,
                                  const at::Tensor& x,
                                  std::int64_t dim,
                                  const GroupRank& group_rank);

// Returns the shape of the tensor of which x is this rank's shard along `dim`.
c10::SymDimVector gathered_shape(std::string_view op,
                                 const at::Tensor& x,
                                 std::int64_t dim,
                                 const std::optional<c10::SymInt>& dim_size,
                                 const GroupRank& group_rank);

// Returns the shape of the result of all_to_all: x, which is full along `split_dim` and sharded
// along `cat_dim`, becomes sharded along `split_dim` and full along `cat_dim`.
c10::SymDimVector exchanged_shape(std::string_view op,
                                  const at::Tensor& x,
                                  std::int64_t split_dim,
                                  std::int64_t cat_dim,
                                  const std::optional<c10::SymInt>& cat_size,
                                  const GroupRank& group_rank);

}  // namespace weft::ops
