// Compares the operators of sequence parallelism, sharded_linear and the vocabulary-parallel losses
// with the unsharded computation. Ranks are threads.
#include "reference.h"
#include "support/thread_ranks.h"

#include <weft/ops/operators.h>

#include <gtest/gtest.h>

namespace weft::testing {
namespace {

at::Tensor random(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); }

at::Tensor local_shard(const at::Tensor& full, int64_t dim, const RankContext& ctx) {
  const auto [start, length] = shard_range(full.size(dim), ctx.group_size, ctx.group_rank);
  return full.narrow(dim, start, length);
}

class Sequence : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { at::manual_seed(7); }
  // Expects `times` calls of a collective on this rank, none in a group of one.
  static void expect_calls(RankContext& ctx, Collective collective, int times) {
    EXPECT_EQ(ctx.backend->count(collective).num_calls, ctx.group_size > 1 ? times : 0)
        << to_string(collective);
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, Sequence, ::testing::Values(1, 2, 3, 4));

TEST_P(Sequence, LinearsEqualTheUnshardedLayer) {
  const auto x = random({2, 7, 5}).requires_grad_();
  const auto w1 = random({6, 5}).requires_grad_();
  const auto b1 = random({6}).requires_grad_();
  const auto w2 = random({3, 6}).requires_grad_();
  const auto b2 = random({3}).requires_grad_();
  const auto grad_y = random({2, 7, 3});
  const auto y = at::linear(at::linear(x, w1, b1).sin(), w2, b2);
  y.backward(grad_y);
  run_ranks(GetParam(), [&](RankContext& ctx) {
    const auto own = [&](const at::Tensor& full, int64_t dim) {
      return shard(full, dim, ctx.group_size, ctx.group_rank);
    };
    const auto x_local = own(x, 1), w1_local = own(w1, 0), b1_local = own(b1, 0),
               w2_local = own(w2, 1);
    const auto b2_local = b2.detach().clone().requires_grad_();
    const auto h = ops::all_gather_linear(x_local, w1_local, b1_local, 1, ctx.group_name, 7).sin();
    const auto out = ops::linear_reduce_scatter(h, w2_local, b2_local, -2, ctx.group_name);
    expect_close(out, local_shard(y, 1, ctx), 1e-12, "y");
    out.backward(local_shard(grad_y, 1, ctx));
    expect_close(x_local.grad(), local_shard(x.grad(), 1, ctx), 1e-12, "grad x");
    expect_close(w1_local.grad(), local_shard(w1.grad(), 0, ctx), 1e-12, "grad w1");
    expect_close(b1_local.grad(), local_shard(b1.grad(), 0, ctx), 1e-12, "grad b1");
    expect_close(w2_local.grad(), local_shard(w2.grad(), 1, ctx), 1e-12, "grad w2");
    expect_close(b2_local.grad(), b2.grad(), 1e-12, "grad b2");
    expect_calls(ctx, Collective::kAllGather, 3);
    expect_calls(ctx, Collective::kReduceScatter, 2);
  });
}

TEST_P(Sequence, FeedForwardEqualsTheUnshardedBlock) {
  const auto x = random({5, 2, 4}).requires_grad_();
  const auto w1 = random({7, 4}).requires_grad_();
  const auto w3 = random({7, 4}).requires_grad_();
  const auto w2 = random({4, 7}).requires_grad_();
  const auto grad_y = random({5, 2, 4});
  const auto y = at::linear(at::silu(at::linear(x, w1)) * at::linear(x, w3), w2);
  y.backward(grad_y);
  for (const bool recompute : {false, true}) {
    run_ranks(GetParam(), [&](RankContext& ctx) {
      const auto own = [&](const at::Tensor& full, int64_t dim) {
        return shard(full, dim, ctx.group_size, ctx.group_rank);
      };
      const auto x_local = own(x, 0);
      const ops::ColumnRowMlpWeights weights{own(w1, 0), own(w2, 1), own(w3, 0)};
      const auto out =
          ops::column_row_mlp(x_local, weights, "silu", ctx.group_name, recompute, 0, 5);
      expect_close(out, local_shard(y, 0, ctx), 1e-12, "y");
      out.backward(local_shard(grad_y, 0, ctx));
      expect_close(x_local.grad(), local_shard(x.grad(), 0, ctx), 1e-12, "grad x");
      expect_close(weights.w1.grad(), local_shard(w1.grad(), 0, ctx), 1e-12, "grad w1");
      expect_close(weights.w2.grad(), local_shard(w2.grad(), 1, ctx), 1e-12, "grad w2");
      expect_close(weights.w3->grad(), local_shard(w3.grad(), 0, ctx), 1e-12, "grad w3");
      expect_calls(ctx, Collective::kAllGather, 3);
      expect_calls(ctx, Collective::kReduceScatter, 2);
    });
  }
}

TEST_P(Sequence, NormsSumTheirParametersGradients) {
  const auto x = random({3, 5, 6}).requires_grad_();
  const auto residual = random({3, 5, 6}).requires_grad_();
  const auto weight = random({6}).requires_grad_();
  const auto bias = random({6}).requires_grad_();
  const auto grad_y = random({3, 5, 6});
  const auto sum = x + residual;
  const auto y = at::layer_norm(sum, {6}, weight, bias) + sum +
                 at::rms_norm(at::rms_norm(sum, {6}, weight, 1e-6), {6}, {}, 1e-3);
  y.backward(grad_y);
  run_ranks(GetParam(), [&](RankContext& ctx) {
    const auto x_local = shard(x, 1, ctx.group_size, ctx.group_rank);
    const auto residual_local = shard(residual, 1, ctx.group_size, ctx.group_rank);
    const auto weight_local = weight.detach().clone().requires_grad_();
    const auto bias_local = bias.detach().clone().requires_grad_();
    const auto [layer, layer_sum] =
        ops::add_layer_norm(x_local, residual_local, weight_local, bias_local, ctx.group_name);
    const auto [rms, rms_sum] =
        ops::add_rms_norm(x_local, residual_local, weight_local, ctx.group_name);
    const auto out = layer + layer_sum + ops::rms_norm(rms, {}, ctx.group_name, 1e-3);
    expect_close(out, local_shard(y, 1, ctx), 1e-12, "y");
    expect_close(rms_sum, local_shard(sum, 1, ctx), 1e-12, "sum");
    out.backward(local_shard(grad_y, 1, ctx));
    expect_close(x_local.grad(), local_shard(x.grad(), 1, ctx), 1e-12, "grad x");
    expect_close(
        residual_local.grad(), local_shard(residual.grad(), 1, ctx), 1e-12, "grad residual");
    expect_close(weight_local.grad(), weight.grad(), 1e-12, "grad weight");
    expect_close(bias_local.grad(), bias.grad(), 1e-12, "grad bias");
    expect_calls(ctx, Collective::kAllReduce, 2);
  });
}

// Only the forward: this test backend has no reduce for the gradient. The Python tests cover the
// backward.
TEST_P(Sequence, ShardedLinearGivesTheFullResult) {
  const auto weight = random({7, 5});
  const auto bias = random({7});
  run_ranks(GetParam(), [&](RankContext& ctx) {
    const auto x = at::full({2, 5}, ctx.group_rank + 1.0, at::kDouble);
    const auto y = ops::sharded_linear(
        x, local_shard(weight, 0, ctx), local_shard(bias, 0, ctx), ctx.group_name, 7);
    expect_close(y, at::linear(x, weight, bias), 1e-12, "y");
  });
}

TEST_P(Sequence, LossesEqualThatOfTheFullVocabulary) {
  const auto x = random({6, 3}).requires_grad_();
  const auto weight = random({11, 3}).requires_grad_();
  const auto target = at::tensor({0, 10, -1, 4, 7, 10}, at::kLong);
  const auto loss = at::cross_entropy_loss(at::linear(x, weight), target, {}, 1, -1, 0.1);
  loss.backward();
  run_ranks(GetParam(), [&](RankContext& ctx) {
    const ops::CrossEntropyOptions options{11, -1, 0.1};
    const auto start = shard_range(11, ctx.group_size, ctx.group_rank).start;
    for (const bool is_fused : {false, true}) {
      const auto x_local = x.detach().clone().requires_grad_();
      const auto rows = shard(weight, 0, ctx.group_size, ctx.group_rank);
      const auto ours = is_fused ? ops::vocab_parallel_linear_cross_entropy(
                                       x_local, rows, target, start, ctx.group_name, options)
                                 : ops::vocab_parallel_cross_entropy(
                                       ops::column_linear(x_local, rows, {}, ctx.group_name),
                                       target,
                                       start,
                                       ctx.group_name,
                                       options);
      expect_close(ours, loss, 1e-12, "loss");
      ours.backward();
      expect_close(x_local.grad(), x.grad(), 1e-12, "grad x");
      expect_close(rows.grad(), local_shard(weight.grad(), 0, ctx), 1e-12, "grad weight");
    }
    expect_calls(ctx, Collective::kAllGather, 2);
    expect_calls(ctx, Collective::kAllReduce, 2);
  });
}

}  // namespace
}  // namespace weft::testing
