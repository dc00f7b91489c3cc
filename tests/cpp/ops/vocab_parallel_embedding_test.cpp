// Compares vocab_parallel_embedding with the unsharded table. Ranks are threads.
#include "reference.h"
#include "support/thread_ranks.h"

#include <weft/ops/operators.h>

#include <gtest/gtest.h>

#include <string>

namespace weft::testing {
namespace {

class VocabParallelEmbedding : public ::testing::TestWithParam<int> {};

// 5 rows: uneven on 2 and 3 ranks, and the last of 4 ranks has none.
TEST_P(VocabParallelEmbedding, EqualsTheUnshardedTable) {
  at::manual_seed(2);
  const auto table = at::randn({5, 3}, at::kDouble).requires_grad_();
  const auto ids = at::tensor({0, 4, 4, 1, 2, 3}, at::kLong).reshape({2, 3});
  const auto grad_y = at::randn({2, 3, 3}, at::kDouble);
  const auto y = at::embedding(table, ids);
  y.backward(grad_y);
  run_ranks(GetParam(), [&](RankContext& ctx) {
    const auto [start, length] = shard_range(5, ctx.group_size, ctx.group_rank);
    const auto rows = shard(table, 0, ctx.group_size, ctx.group_rank);
    for (const auto dtype : {at::kLong, at::kInt}) {
      ctx.backend->reset_counts();
      rows.mutable_grad().reset();
      const auto out = ops::vocab_parallel_embedding(ids.to(dtype), rows, start, ctx.group_name, 5);
      EXPECT_TRUE(at::equal(out, y));
      out.backward(grad_y);
      EXPECT_EQ(ctx.backend->num_calls(), ctx.group_size > 1 ? 1 : 0);
      expect_close(rows.grad(), table.grad().narrow(0, start, length), 1e-12, "grad");
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, VocabParallelEmbedding, ::testing::Values(1, 2, 3, 4));

TEST(VocabParallelEmbeddingErrors, AreOneSentenceBeforeAnyCommunication) {
  run_ranks(2, [](RankContext& ctx) {
    const auto rows = at::ones({3, 2});
    const auto error = [&](const at::Tensor& ids, int64_t start = 0) {
      return error_of([&] { ops::vocab_parallel_embedding(ids, rows, start, ctx.group_name, 6); });
    };
    EXPECT_EQ(
        error(at::ones({2})),
        "weft::vocab_parallel_embedding: got input of dtype Float; pass token ids as int64 or "
        "int32.");
    EXPECT_EQ(
        error(at::tensor({1, 6}, at::kLong)),
        "weft::vocab_parallel_embedding: got token ids from 1 to 6; pass ids from 0 to vocab_size "
        "- 1 = 5.");
    EXPECT_EQ(
        error(at::tensor({1}, at::kLong), -1),
        "weft::vocab_parallel_embedding: got vocab_start -1; pass the index of this rank's first "
        "row, 0 or more.");
    EXPECT_EQ(ctx.backend->num_calls(), 0);
  });
}

}  // namespace
}  // namespace weft::testing
