// The operators on parts of a sequence, a weight that no rank has whole, and the loss of a cut
// vocabulary, against the unsharded computation; ranks as threads.
#include "reference.h"
#include "support/thread_ranks.h"

#include <weft/ops/operators.h>

#include <gtest/gtest.h>

namespace weft::testing {
namespace {

at::Tensor random(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); }

at::Tensor part_of(const at::Tensor& whole, int64_t dim, const RankContext& ctx) {
  const auto [start, length] = shard_range(whole.size(dim), ctx.group_size, ctx.group_rank);
  return whole.narrow(dim, start, length);
}

class Sequence : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { at::manual_seed(7); }
  // How often a rank of `ctx` calls a collective that it calls `times` in a group of several.
  static void expect_calls(RankContext& ctx, Collective collective, int times) {
    EXPECT_EQ(ctx.backend->count(collective).num_calls, ctx.group_size > 1 ? times : 0)
        << to_string(collective);
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, Sequence, ::testing::Values(1, 2, 3, 4));

TEST_P(Sequence, LinearsEqualTheWholeLayer) {
  const auto x = random({2, 7, 5}).requires_grad_();
  const auto w1 = random({6, 5}).requires_grad_();
  const auto b1 = random({6}).requires_grad_();
  const auto w2 = random({3, 6}).requires_grad_();
  const auto b2 = random({3}).requires_grad_();
  const auto grad_y = random({2, 7, 3});
  const auto y = at::linear(at::linear(x, w1, b1).sin(), w2, b2);
  y.backward(grad_y);
  run_ranks(GetParam(), [&](RankContext& ctx) {
    const auto own = [&](const at::Tensor& whole, int64_t dim) {
      return shard(whole, dim, ctx.group_size, ctx.group_rank);
    };
    const auto x_here = own(x, 1), w1_here = own(w1, 0), b1_here = own(b1, 0), w2_here = own(w2, 1);
    const auto b2_here = b2.detach().clone().requires_grad_();
    const auto h = ops::all_gather_linear(x_here, w1_here, b1_here, 1, ctx.group_name, 7).sin();
    const auto out = ops::linear_reduce_scatter(h, w2_here, b2_here, -2, ctx.group_name);
    expect_close(out, part_of(y, 1, ctx), 1e-12, "y");
    out.backward(part_of(grad_y, 1, ctx));
    expect_close(x_here.grad(), part_of(x.grad(), 1, ctx), 1e-12, "grad x");
    expect_close(w1_here.grad(), part_of(w1.grad(), 0, ctx), 1e-12, "grad w1");
    expect_close(b1_here.grad(), part_of(b1.grad(), 0, ctx), 1e-12, "grad b1");
    expect_close(w2_here.grad(), part_of(w2.grad(), 1, ctx), 1e-12, "grad w2");
    expect_close(b2_here.grad(), b2.grad(), 1e-12, "grad b2");
    expect_calls(ctx, Collective::kAllGather, 3);
    expect_calls(ctx, Collective::kReduceScatter, 2);
  });
}

TEST_P(Sequence, FeedForwardEqualsTheWholeBlock) {
  const auto x = random({5, 2, 4}).requires_grad_();
  const auto w1 = random({7, 4}).requires_grad_();
  const auto w3 = random({7, 4}).requires_grad_();
  const auto w2 = random({4, 7}).requires_grad_();
  const auto grad_y = random({5, 2, 4});
  const auto y = at::linear(at::silu(at::linear(x, w1)) * at::linear(x, w3), w2);
  y.backward(grad_y);
  for (const bool recompute : {false, true}) {
    run_ranks(GetParam(), [&](RankContext& ctx) {
      const auto own = [&](const at::Tensor& whole, int64_t dim) {
        return shard(whole, dim, ctx.group_size, ctx.group_rank);
      };
      const auto x_here = own(x, 0);
      const ops::ColumnRowMlpWeights weights{own(w1, 0), own(w2, 1), own(w3, 0)};
      const auto out =
          ops::column_row_mlp(x_here, weights, "silu", ctx.group_name, recompute, 0, 5);
      expect_close(out, part_of(y, 0, ctx), 1e-12, "y");
      out.backward(part_of(grad_y, 0, ctx));
      expect_close(x_here.grad(), part_of(x.grad(), 0, ctx), 1e-12, "grad x");
      expect_close(weights.w1.grad(), part_of(w1.grad(), 0, ctx), 1e-12, "grad w1");
      expect_close(weights.w2.grad(), part_of(w2.grad(), 1, ctx), 1e-12, "grad w2");
      expect_close(weights.w3->grad(), part_of(w3.grad(), 0, ctx), 1e-12, "grad w3");
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
    const auto x_here = shard(x, 1, ctx.group_size, ctx.group_rank);
    const auto residual_here = shard(residual, 1, ctx.group_size, ctx.group_rank);
    const auto weight_here = weight.detach().clone().requires_grad_();
    const auto bias_here = bias.detach().clone().requires_grad_();
    const auto [layer, layer_sum] =
        ops::add_layer_norm(x_here, residual_here, weight_here, bias_here, ctx.group_name);
    const auto [rms, rms_sum] =
        ops::add_rms_norm(x_here, residual_here, weight_here, ctx.group_name);
    const auto out = layer + layer_sum + ops::rms_norm(rms, {}, ctx.group_name, 1e-3);
    expect_close(out, part_of(y, 1, ctx), 1e-12, "y");
    expect_close(rms_sum, part_of(sum, 1, ctx), 1e-12, "sum");
    out.backward(part_of(grad_y, 1, ctx));
    expect_close(x_here.grad(), part_of(x.grad(), 1, ctx), 1e-12, "grad x");
    expect_close(residual_here.grad(), part_of(residual.grad(), 1, ctx), 1e-12, "grad residual");
    expect_close(weight_here.grad(), weight.grad(), 1e-12, "grad weight");
    expect_close(bias_here.grad(), bias.grad(), 1e-12, "grad bias");
    expect_calls(ctx, Collective::kAllReduce, 2);
  });
}

// The gradient's reduce is not among what these ranks can; the Python tests have it.
TEST_P(Sequence, ShardedLinearGivesTheWholeResult) {
  const auto weight = random({7, 5});
  const auto bias = random({7});
  run_ranks(GetParam(), [&](RankContext& ctx) {
    const auto x = at::full({2, 5}, ctx.group_rank + 1.0, at::kDouble);
    const auto y =
        ops::sharded_linear(x, part_of(weight, 0, ctx), part_of(bias, 0, ctx), ctx.group_name, 7);
    expect_close(y, at::linear(x, weight, bias), 1e-12, "y");
  });
}

TEST_P(Sequence, LossesEqualThatOfTheWholeVocabulary) {
  const auto x = random({6, 3}).requires_grad_();
  const auto weight = random({11, 3}).requires_grad_();
  const auto target = at::tensor({0, 10, -1, 4, 7, 10}, at::kLong);
  const auto loss = at::cross_entropy_loss(at::linear(x, weight), target, {}, 1, -1, 0.1);
  loss.backward();
  run_ranks(GetParam(), [&](RankContext& ctx) {
    const ops::CrossEntropyOptions options{11, -1, 0.1};
    const auto start = shard_range(11, ctx.group_size, ctx.group_rank).start;
    for (const bool is_fused : {false, true}) {
      const auto x_here = x.detach().clone().requires_grad_();
      const auto rows = shard(weight, 0, ctx.group_size, ctx.group_rank);
      const auto ours = is_fused ? ops::vocab_parallel_linear_cross_entropy(
                                       x_here, rows, target, start, ctx.group_name, options)
                                 : ops::vocab_parallel_cross_entropy(
                                       ops::column_linear(x_here, rows, {}, ctx.group_name),
                                       target,
                                       start,
                                       ctx.group_name,
                                       options);
      expect_close(ours, loss, 1e-12, "loss");
      ours.backward();
      expect_close(x_here.grad(), x.grad(), 1e-12, "grad x");
      expect_close(rows.grad(), part_of(weight.grad(), 0, ctx), 1e-12, "grad weight");
    }
    expect_calls(ctx, Collective::kAllGather, 2);
    expect_calls(ctx, Collective::kAllReduce, 2);
  });
}

}  // namespace
}  // namespace weft::testing
