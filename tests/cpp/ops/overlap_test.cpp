// The choice between unchunked and chunked communication, from C++. Ranks are threads.
#include "reference.h"
#include "support/thread_ranks.h"

#include <weft/ops/operators.h>
#include <weft/ops/overlap.h>

#include <gtest/gtest.h>

namespace weft::testing {
namespace {

class Overlap : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(3); }
  void TearDown() override {
    ops::set_overlap("auto");
    ops::set_overlap_table({});
  }
};

// Runs the layer on `num_rows` rows, sharded over the ranks; returns the number of all-gathers of a
// rank in the forward.
int64_t num_gathers(int num_ranks, int64_t num_rows, int64_t num_features) {
  const auto x = at::randn({num_rows, num_features}, at::kDouble);
  const auto weight = at::randn({3, num_features}, at::kDouble);
  std::atomic<int64_t> num_calls = 0;
  run_ranks(num_ranks, [&](RankContext& ctx) {
    const auto [start, length] = shard_range(num_rows, ctx.group_size, ctx.group_rank);
    const auto y =
        ops::all_gather_linear(x.narrow(0, start, length), weight, {}, 0, ctx.group_name, num_rows);
    expect_close(y, at::linear(x, weight), 1e-11, "y");
    num_calls = ctx.backend->count(Collective::kAllGather).num_calls;
  });
  return num_calls;
}

TEST_F(Overlap, TheModeChoosesTheNumberOfChunks) {
  EXPECT_EQ(ops::overlap(), "auto");
  EXPECT_EQ(num_gathers(3, 7, 5), 1);
  ops::set_overlap("always");
  EXPECT_EQ(ops::overlap(), "always");
  EXPECT_EQ(num_gathers(3, 7, 5), 2);
  EXPECT_EQ(num_gathers(3, 2, 5), 1);  // shards of at most one row are not chunked
  ops::set_overlap("never");
  EXPECT_EQ(num_gathers(2, 512, 2048), 1);
  EXPECT_THROW(ops::set_overlap("maybe"), c10::ValueError);
  EXPECT_EQ(ops::overlap(), "never");
}

TEST_F(Overlap, PresetChoicesApplyToShapesThatRoundUpToThem) {
  const ops::OverlapEntry entry{
      "weft::all_gather_linear", "float64", "cpu", 2, 512, 2048 * 8, true, 0.5};
  auto longer = entry, more_ranks = entry;
  longer.num_rows = 1024;
  more_ranks.num_ranks = 4;
  longer.in_pieces = more_ranks.in_pieces = false;
  ops::set_overlap_table({entry, longer, more_ranks});
  const auto table = ops::overlap_table();
  ASSERT_EQ(table.size(), 3);
  EXPECT_EQ(table[0].op, entry.op);
  EXPECT_TRUE(table[0].in_pieces);
  // Chunks of 2 MiB: 64 rows of each rank.
  EXPECT_EQ(num_gathers(2, 512, 2048), 4);
  EXPECT_EQ(num_gathers(2, 400, 2000), 4);
  EXPECT_EQ(num_gathers(2, 600, 2048), 1);
  EXPECT_EQ(num_gathers(4, 512, 2048), 1);
}

}  // namespace
}  // namespace weft::testing
