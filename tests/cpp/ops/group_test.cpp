// The operators on groups, the group of one, and the torch version of the build.
#include "reference.h"
#include "support/thread_ranks.h"

#include <weft/ops/operators.h>

#include <gtest/gtest.h>
#include <torch/version.h>

#include <string>

namespace weft::testing {
namespace {

TEST(GroupOperators, CopyIsIdentityForwardAndSumBackward) {
  run_ranks(3, [](RankContext& ctx) {
    const auto x = at::arange(4, at::kDouble).requires_grad_();
    const auto y = ops::copy_to_group(x, ctx.group_name);
    EXPECT_TRUE(at::equal(y, x));
    EXPECT_EQ(ctx.backend->num_calls(), 0);
    (y * (ctx.group_rank + 1)).sum().backward();
    EXPECT_EQ(ctx.backend->num_calls(), 1);
    EXPECT_TRUE(at::equal(x.grad(), at::full({4}, 6, at::kDouble)));
  });
}

TEST(GroupOperators, ReduceIsSumForwardAndIdentityBackward) {
  run_ranks(3, [](RankContext& ctx) {
    const auto x = at::full({2, 2}, ctx.group_rank + 1.0, at::kDouble).requires_grad_();
    const auto y = ops::reduce_from_group(x.t(), ctx.group_name);
    EXPECT_TRUE(at::equal(y, at::full({2, 2}, 6, at::kDouble)));
    EXPECT_EQ(x[0][0].item<double>(), ctx.group_rank + 1.0);  // the input is unchanged
    (y * 2).sum().backward();
    EXPECT_EQ(ctx.backend->num_calls(), 1);
    EXPECT_TRUE(at::equal(x.grad(), at::full({2, 2}, 2, at::kDouble)));
  });
}

TEST(GroupOperators, SequencesAreGatheredAndReduceScattered) {
  run_ranks(3, [](RankContext& ctx) {
    // Shards of 2, 2 and 1 of 5 tokens.
    const auto full = at::arange(5, at::kDouble);
    const auto local = full.chunk(3)[ctx.group_rank].clone().requires_grad_();
    const auto y = ops::gather_from_sequence(local, 0, ctx.group_name, 5);
    EXPECT_TRUE(at::equal(y, full));
    const auto z = ops::reduce_scatter_to_sequence(y * (ctx.group_rank + 1), -1, ctx.group_name);
    EXPECT_TRUE(at::equal(z, (full * 6).chunk(3)[ctx.group_rank]));
    EXPECT_EQ(ctx.backend->count(Collective::kAllGather).num_calls, 1);
    EXPECT_EQ(ctx.backend->count(Collective::kReduceScatter).num_calls, 1);
    z.sum().backward();
    EXPECT_EQ(ctx.backend->num_calls(), 4);
    EXPECT_TRUE(at::equal(local.grad(), at::full_like(local, 6)));
  });
}

TEST(GroupOperators, ReplicatedTensorsAreScatteredAndGathered) {
  run_ranks(2, [](RankContext& ctx) {
    const auto x = at::arange(6, at::kDouble).view({2, 3}).requires_grad_();
    const auto local = ops::scatter_to_group(x, 1, ctx.group_name);
    EXPECT_TRUE(at::equal(local, x.chunk(2, 1)[ctx.group_rank]));
    EXPECT_EQ(ctx.backend->num_calls(), 0);
    EXPECT_TRUE(at::equal(ops::gather_from_group(local, 1, ctx.group_name, 3), x));
    (local * 3).sum().backward();
    EXPECT_EQ(ctx.backend->count(Collective::kAllGather).num_calls, 2);
    EXPECT_TRUE(at::equal(x.grad(), at::full({2, 3}, 3, at::kDouble)));
  });
}

TEST(GroupOperators, AFailedReductionNamesOperatorAndRank) {
  RankOptions options;
  options.require_waits = false;
  run_ranks(
      2,
      [](RankContext& ctx) {
        if (ctx.group_rank == 1) return;  // never calls the all-reduce
        const auto x = at::ones({2});
        std::string text;
        try {
          ops::reduce_from_group(x, ctx.group_name);
        } catch (const std::exception& error) {
          text = error.what();
        }
        EXPECT_NE(
            text.find("weft::reduce_from_group: the all-reduce failed on rank 0 of its group"),
            std::string::npos)
            << text;
      },
      options);
}

TEST(GroupOfOne, NeedsNoProcessGroup) {
  const auto x = at::ones({2, 3}).requires_grad_();
  EXPECT_TRUE(at::equal(ops::copy_to_group(x, ""), x));
  EXPECT_TRUE(at::equal(ops::reduce_from_group(x, ""), x));
  EXPECT_NE(ops::reduce_from_group(x, "").data_ptr(), x.data_ptr());
}

TEST(Build, ReportsItsTorchRelease) {
  const auto expected = std::to_string(TORCH_VERSION_MAJOR) + "." +
                        std::to_string(TORCH_VERSION_MINOR) + "." +
                        std::to_string(TORCH_VERSION_PATCH);
  EXPECT_EQ(ops::built_for_torch(), expected);
}

}  // namespace
}  // namespace weft::testing
