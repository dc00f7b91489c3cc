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

// The part of a dim that `rank` of a group of `num_ranks` holds, cut as torch.chunk and DTensor's
// Shard cut it: chunks of ceil(dim_size / num_ranks), later ones smaller or empty. An empty shard
// starts at dim_size. Throws std::invalid_argument for dim_size < 0, num_ranks < 1 and a rank
// outside the group.
ShardRange shard_range(int64_t dim_size, int64_t num_ranks, int64_t rank);

// Attention heads are never cut: throws std::invalid_argument unless `num_heads`, the value of
// `attribute` read for `module`, divides by `tp_size`. The names only serve the error's text.
void check_heads(std::string_view module,
                 std::string_view attribute,
                 int64_t num_heads,
                 int64_t tp_size);

}  // namespace weft::strategy
