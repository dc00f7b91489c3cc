#include "weft/strategy/shard.h"

#include "error_of.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace weft::strategy {
namespace {

// Returns the sizes of torch.chunk(arange(dim_size), num_ranks), padded with zeros to num_ranks:
// chunks of ceil(dim_size / num_ranks) until nothing is left.
std::vector<int64_t> chunk_sizes(int64_t dim_size, int64_t num_ranks) {
  std::vector<int64_t> sizes(static_cast<size_t>(num_ranks), 0);
  const int64_t shard_size = (dim_size + num_ranks - 1) / num_ranks;
  int64_t left = dim_size;
  for (size_t i = 0; left > 0; ++i) {
    sizes[i] = shard_size < left ? shard_size : left;
    left -= sizes[i];
  }
  return sizes;
}

TEST(ShardRange, MatchesTorchChunk) {
  EXPECT_EQ(shard_range(5, 2, 0), (ShardRange{0, 3}));
  EXPECT_EQ(shard_range(5, 2, 1), (ShardRange{3, 2}));
  EXPECT_EQ(shard_range(5, 4, 2), (ShardRange{4, 1}));
  EXPECT_EQ(shard_range(5, 4, 3), (ShardRange{5, 0}));
  EXPECT_EQ(shard_range(0, 3, 2), (ShardRange{0, 0}));
}

TEST(ShardRange, ShardsCoverTheDimInOrder) {
  for (int64_t dim_size = 0; dim_size <= 70; ++dim_size) {
    for (int64_t num_ranks = 1; num_ranks <= 20; ++num_ranks) {
      const auto sizes = chunk_sizes(dim_size, num_ranks);
      int64_t next = 0;
      for (int64_t rank = 0; rank < num_ranks; ++rank) {
        ASSERT_EQ(shard_range(dim_size, num_ranks, rank),
                  (ShardRange{next, sizes[static_cast<size_t>(rank)]}))
            << dim_size << " over " << num_ranks;
        next += sizes[static_cast<size_t>(rank)];
      }
      ASSERT_EQ(next, dim_size);
    }
  }
}

TEST(ShardRange, LargestSizesDoNotOverflow) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(shard_range(kMax, 2, 1), (ShardRange{kMax / 2 + 1, kMax / 2}));
  EXPECT_EQ(shard_range(kMax, kMax, kMax - 1), (ShardRange{kMax - 1, 1}));
  EXPECT_EQ(shard_range(kMax - 1, kMax, kMax - 1), (ShardRange{kMax - 1, 0}));
  EXPECT_EQ(shard_range(kMax, kMax - 1, kMax - 2), (ShardRange{kMax, 0}));
}

TEST(ShardRange, RejectsSizesAndRanksOutOfRange) {
  const std::string remedy =
      "; give a size of at least 0, at least 1 rank and a rank below their number";
  EXPECT_EQ(error_of([] { return shard_range(5, 2, 2); }),
            "shard_range: a dim of size 5 has no shard for rank 2 of 2" + remedy);
  EXPECT_EQ(error_of([] { return shard_range(-1, 2, 0); }),
            "shard_range: a dim of size -1 has no shard for rank 0 of 2" + remedy);
  EXPECT_EQ(error_of([] { return shard_range(5, 0, 0); }),
            "shard_range: a dim of size 5 has no shard for rank 0 of 0" + remedy);
  EXPECT_EQ(error_of([] { return shard_range(5, 2, -1); }),
            "shard_range: a dim of size 5 has no shard for rank -1 of 2" + remedy);
}

std::string heads_error(std::string_view module, int64_t num_heads, int64_t tp_size) {
  return error_of([&] {
    check_heads(module, "n_heads", num_heads, tp_size);
    return 0;
  });
}

TEST(CheckHeads, DivisibleCountsPass) {
  for (int64_t num_heads = 1; num_heads <= 32; ++num_heads) {
    for (int64_t tp_size = 1; tp_size <= 32; ++tp_size) {
      EXPECT_EQ(heads_error("wq", num_heads, tp_size) == "accepted", num_heads % tp_size == 0);
    }
  }
}

TEST(CheckHeads, NamesTheModuleAndTheCounts) {
  EXPECT_EQ(heads_error("layers.0.attention.wq", 6, 4),
            "layers.0.attention.wq: n_heads = 6 heads do not divide over 4 tensor-parallel ranks; "
            "use a tensor-parallel size that divides 6 or style 'replicate'");
  EXPECT_EQ(heads_error("", 0, 4),
            "the model itself: n_heads = 0 heads over 4 tensor-parallel ranks: both must be at "
            "least 1; correct the attribute or the size");
  EXPECT_EQ(heads_error("wq", 4, 0),
            "wq: n_heads = 4 heads over 0 tensor-parallel ranks: both must be at least 1; correct "
            "the attribute or the size");
}

}  // namespace
}  // namespace weft::strategy
