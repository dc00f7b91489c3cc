#pragma once

#include <cstdint>
#include <string_view>

namespace weft::strategy {

// A half-open range [start, start + length) of indices along one dim of a tensor.
struct ShardRange {
  int64_t start = 0;
  int64_t length = 0;

  bool operator==(const ShardRange&) const = default;
};

// Returns the shard of a dim that `rank` of a group of `num_ranks` holds, as in torch.chunk and
// DTensor's Shard: ceil(dim_size / num_ranks) indices per rank, fewer or none on the last ranks. An
// empty shard starts at dim_size. Throws std::invalid_argument for dim_size < 0, num_ranks < 1 and
// a rank outside the group.
ShardRange shard_range(int64_t dim_size, int64_t num_ranks, int64_t rank);

// Throws std::invalid_argument unless `num_heads` is at least 1 and divisible by `tp_size`:
// attention heads are never split across ranks. `module` and `attribute`, from which the number was
// read, appear only in the error.
void check_heads(std::string_view module,
                 std::string_view attribute,
                 int64_t num_heads,
                 int64_t tp_size);

}  // namespace weft::strategy
