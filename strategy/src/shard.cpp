#include "weft/strategy/shard.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace weft::strategy {

ShardRange shard_range(int64_t dim_size, int64_t num_ranks, int64_t rank) {
  if (dim_size < 0 || num_ranks < 1 || rank < 0 || rank >= num_ranks) {
    throw std::invalid_argument(
        "shard_range: a dim of size " + std::to_string(dim_size) + " has no shard for rank " +
        std::to_string(rank) + " of " + std::to_string(num_ranks) +
        "; give a size of at least 0, at least 1 rank and a rank below their number");
  }
  const int64_t shard_size = dim_size / num_ranks + (dim_size % num_ranks != 0 ? 1 : 0);
  // Compared by division: rank * shard_size may overflow if the shard is empty.
  if (shard_size == 0 || rank > dim_size / shard_size) {
    return {.start = dim_size, .length = 0};
  }
  const int64_t start = rank * shard_size;
  return {.start = start, .length = std::min(shard_size, dim_size - start)};
}

void check_heads(std::string_view module,
                 std::string_view attribute,
                 int64_t num_heads,
                 int64_t tp_size) {
  const std::string what =
      std::string(module.empty() ? "the model itself" : module) + ": " + std::string(attribute);
  if (num_heads < 1 || tp_size < 1) {
    throw std::invalid_argument(what + " = " + std::to_string(num_heads) + " heads over " +
                                std::to_string(tp_size) +
                                " tensor-parallel ranks: both must be at least 1; correct the "
                                "attribute or the size");
  }
  if (num_heads % tp_size != 0) {
    throw std::invalid_argument(what + " = " + std::to_string(num_heads) +
                                " heads do not divide over " + std::to_string(tp_size) +
                                " tensor-parallel ranks; use a tensor-parallel size that divides " +
                                std::to_string(num_heads) + " or style 'replicate'");
  }
}

}  // namespace weft::strategy
