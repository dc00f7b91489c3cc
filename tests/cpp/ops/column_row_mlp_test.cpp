// Compares column_row_mlp with the unsharded block: values, gradients, communication, shapes,
// errors. Ranks are threads.
#include "reference.h"
#include "support/thread_ranks.h"

#include <weft/ops/operators.h>

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <string>
#include <tuple>
#include <vector>

namespace weft::testing {
namespace {

struct Block {
  at::Tensor w1, w2, w3, b1, b2, b3;  // undefined if the block has none

  static Block random(bool gated, bool bias, int64_t dim, int64_t hidden, at::ScalarType dtype) {
    const auto options = at::TensorOptions(dtype);
    const auto make = [&](bool wanted, at::IntArrayRef shape) {
      return wanted ? at::randn(shape, options).requires_grad_() : at::Tensor();
    };
    return {make(true, {hidden, dim}),
            make(true, {dim, hidden}),
            make(gated, {hidden, dim}),
            make(bias, {hidden}),
            make(bias, {dim}),
            make(gated && bias, {hidden})};
  }

  Block sharded(int num_ranks, int rank) const {
    const auto shard_of = [&](const at::Tensor& full, int64_t dim) {
      return full.defined() ? shard(full, dim, num_ranks, rank) : at::Tensor();
    };
    return {shard_of(w1, 0),
            shard_of(w2, 1),
            shard_of(w3, 0),
            shard_of(b1, 0),
            b2.defined() ? b2.detach().clone().requires_grad_() : at::Tensor(),
            shard_of(b3, 0)};
  }

  ops::ColumnRowMlpWeights weights() const {
    const auto optional = [](const at::Tensor& tensor) {
      return tensor.defined() ? std::optional(tensor) : std::nullopt;
    };
    return {w1, w2, optional(w3), optional(b1), optional(b2), optional(b3)};
  }

  at::Tensor forward(const at::Tensor& x, const std::string& activation) const {
    auto h = apply_activation(at::linear(x, w1, b1), activation);
    if (w3.defined()) h = h * at::linear(x, w3, b3);
    return at::linear(h, w2, b2);
  }
};

void expect_shard_grad(const at::Tensor& local,
                       const at::Tensor& full,
                       int64_t dim,
                       const RankContext& ctx,
                       const std::string& what) {
  if (!full.defined()) return;
  const auto [start, length] = shard_range(full.size(dim), ctx.group_size, ctx.group_rank);
  expect_close(local.grad(), full.grad().narrow(dim, start, length), 1e-12, what);
}

using Case =
    std::tuple<int /*ranks*/, bool /*gated*/, bool /*bias*/, std::string, bool /*recompute*/>;

class ColumnRowMlp : public ::testing::TestWithParam<Case> {};

TEST_P(ColumnRowMlp, EqualsTheUnshardedBlock) {
  const auto& [num_ranks, gated, bias, activation, recompute] = GetParam();
  at::manual_seed(7);
  const auto full = Block::random(gated, bias, 5, 7, at::kDouble);  // 7: uneven on 2, 3, 4 ranks
  const auto x = at::randn({2, 3, 5}, at::kDouble).requires_grad_();
  const auto grad_y = at::randn({2, 3, 5}, at::kDouble);
  const auto y = full.forward(x, activation);
  y.backward(grad_y);

  run_ranks(num_ranks, [&](RankContext& ctx) {
    const auto local = full.sharded(ctx.group_size, ctx.group_rank);
    const auto x_local = x.detach().clone().requires_grad_();
    const auto out =
        ops::column_row_mlp(x_local, local.weights(), activation, ctx.group_name, recompute);
    expect_close(out, y, 1e-12, "y");
    const int64_t forward = ctx.group_size > 1 ? 1 : 0;
    EXPECT_EQ(ctx.backend->count(Collective::kAllReduce).num_calls, forward);
    EXPECT_EQ(ctx.backend->count(Collective::kAllReduce).num_bytes, forward * y.nbytes());
    out.backward(grad_y);
    EXPECT_EQ(ctx.backend->num_calls(), 2 * forward);
    expect_close(x_local.grad(), x.grad(), 1e-12, "grad x");
    expect_shard_grad(local.w1, full.w1, 0, ctx, "grad w1");
    expect_shard_grad(local.w2, full.w2, 1, ctx, "grad w2");
    expect_shard_grad(local.w3, full.w3, 0, ctx, "grad w3");
    expect_shard_grad(local.b1, full.b1, 0, ctx, "grad b1");
    expect_shard_grad(local.b3, full.b3, 0, ctx, "grad b3");
    if (bias) expect_close(local.b2.grad(), full.b2.grad(), 1e-12, "grad b2");
  });
}

std::string mlp_case_name(const ::testing::TestParamInfo<Case>& info) {
  const auto& [ranks, gated, bias, activation, recompute] = info.param;
  return std::to_string(ranks) + "ranks_" + activation + (gated ? "_gated" : "") +
         (bias ? "_bias" : "") + (recompute ? "_recompute" : "");
}

INSTANTIATE_TEST_SUITE_P(All,
                         ColumnRowMlp,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Bool(),
                                            ::testing::Bool(),
                                            ::testing::Values("silu", "gelu", "gelu_tanh", "relu"),
                                            ::testing::Bool()),
                         mlp_case_name);

TEST(ColumnRowMlpCommunication, NoBackwardAllReduceForAnInputWithoutGradient) {
  const auto full = Block::random(true, false, 4, 6, at::kDouble);
  run_ranks(2, [&](RankContext& ctx) {
    const auto local = full.sharded(2, ctx.group_rank);
    ops::column_row_mlp(at::ones({3, 4}, at::kDouble), local.weights(), "silu", ctx.group_name)
        .sum()
        .backward();
    EXPECT_EQ(ctx.backend->num_calls(), 1);
    EXPECT_TRUE(local.w1.grad().defined());
  });
}

TEST(ColumnRowMlpCommunication, FrozenWeightsGetNoGradient) {
  const auto full = Block::random(true, true, 4, 6, at::kDouble);
  run_ranks(2, [&](RankContext& ctx) {
    const auto local = full.sharded(2, ctx.group_rank);
    for (const auto& frozen : {local.w1, local.w2, local.b3}) frozen.requires_grad_(false);
    const auto x = at::ones({3, 4}, at::kDouble).requires_grad_();
    ops::column_row_mlp(x, local.weights(), "gelu", ctx.group_name).sum().backward();
    for (const auto& frozen : {local.w1, local.w2, local.b3}) EXPECT_FALSE(frozen.grad().defined());
    for (const auto& trained : {local.w3, local.b1, local.b2, x}) {
      EXPECT_TRUE(trained.grad().defined());
    }
  });
}

// The backward must wait for the all-reduce of the input gradient, even if it completes late.
TEST(ColumnRowMlpCommunication, WaitsForALateAllReduce) {
  at::manual_seed(3);
  const auto full = Block::random(true, false, 4, 6, at::kDouble);
  const auto x = at::randn({3, 4}, at::kDouble).requires_grad_();
  full.forward(x, "silu").sum().backward();
  RankOptions options;
  options.group.all_reduce_delay = std::chrono::milliseconds(50);
  run_ranks(
      2,
      [&](RankContext& ctx) {
        const auto local = full.sharded(2, ctx.group_rank);
        const auto x_local = x.detach().clone().requires_grad_();
        ops::column_row_mlp(x_local, local.weights(), "silu", ctx.group_name).sum().backward();
        expect_close(x_local.grad(), x.grad(), 1e-12, "grad x");
      },
      options);
}

TEST(ColumnRowMlpShapes, MayBeNonContiguousVectorsOrEmpty) {
  const auto full = Block::random(true, true, 4, 6, at::kDouble);
  run_ranks(2, [&](RankContext& ctx) {
    const auto local = full.sharded(2, ctx.group_rank);
    const std::vector<at::Tensor> inputs = {
        at::arange(24, at::kDouble).reshape({4, 3, 2}).div(24).permute({2, 1, 0}),
        at::arange(4, at::kDouble),
        at::empty({0, 4}, at::kDouble),
        at::empty({2, 0, 4}, at::kDouble)};
    for (const auto& input : inputs) {
      const auto x = input.detach().requires_grad_();
      const auto reference = x.detach().clone().requires_grad_();
      const auto y = ops::column_row_mlp(x, local.weights(), "silu", ctx.group_name);
      const auto expected = full.forward(reference, "silu");
      expect_close(y, expected, 1e-12, "y");
      y.sum().backward();
      const auto grad = torch::autograd::grad({expected.sum()}, {reference})[0];
      expect_close(x.grad(), grad, 1e-12, "grad x");
    }
  });
}

TEST(ColumnRowMlpErrors, AreOneSentenceBeforeAnyCommunication) {
  run_ranks(2, [](RankContext& ctx) {
    const auto x = at::ones({3, 4});
    const auto w = at::ones({6, 4});
    const auto w2 = at::ones({4, 6});
    const auto error = [&](const at::Tensor& input,
                           const ops::ColumnRowMlpWeights& weights,
                           const std::string& activation = "silu",
                           const std::string& group = "tensor_parallel") {
      return error_of([&] { ops::column_row_mlp(input, weights, activation, group); });
    };
    EXPECT_EQ(
        error(x, {at::ones({6, 5}), w2}),
        "weft::column_row_mlp: got w1 of shape [6, 5], whose second dim must be 4, the last dim "
        "of x; pass this rank's shard in nn.Linear's layout [out, in].");
    EXPECT_EQ(
        error(x, {w, at::ones({4, 5})}),
        "weft::column_row_mlp: got w2 of shape [4, 5], whose second dim must be 6, the number of "
        "rows of w1; pass this rank's shard in nn.Linear's layout [out, in].");
    EXPECT_EQ(
        error(x, {w, w2, at::ones({5, 4})}),
        "weft::column_row_mlp: got w3 of shape [5, 4], which must be w1's, [6, 4]; shard w1 and w3 "
        "alike.");
    EXPECT_EQ(
        error(x, {w, w2, {}, at::ones({5})}),
        "weft::column_row_mlp: got b1 of shape [5], which must be [6], one entry for each row of "
        "w1; shard bias and weight alike.");
    EXPECT_EQ(error(x, {w, w2, {}, {}, {}, at::ones({6})}),
              "weft::column_row_mlp: got b3 without w3, whose bias it is; pass w3 too, or no b3.");
    EXPECT_EQ(
        error(x, {w, w2}, "swish"),
        "weft::column_row_mlp: got activation 'swish'; pass one of 'silu', 'gelu', 'gelu_tanh', "
        "'relu'.");
    EXPECT_EQ(
        error(x, {w.to(at::kDouble), w2}),
        "weft::column_row_mlp: got w1 of dtype Double with x of dtype Float; convert one of them, "
        "or run under torch.autocast.");
    EXPECT_EQ(
        error(x.to(at::kInt), {w.to(at::kInt), w2.to(at::kInt)}),
        "weft::column_row_mlp: got x of dtype Int; pass float32, float64, bfloat16 or float16.");
    EXPECT_EQ(error(x, {at::ones({6, 4}, at::kMeta), w2}),
              "weft::column_row_mlp: got w1 on meta with x on cpu; move them to one device.");
    EXPECT_EQ(
        error(x, {w, w2}, "silu", "nowhere"),
        "weft::column_row_mlp: got group_name 'nowhere', which is no process group of this "
        "process; pass the group_name of a group made with torch.distributed or DeviceMesh (rebind "
        "a loaded module with weft.nn.rebind_group), or '' for a group of one.");
    EXPECT_EQ(
        error(at::ones({}), {w, w2}),
        "weft::column_row_mlp: got x without dims; pass at least one dim, x [..., features].");
    EXPECT_EQ(ctx.backend->num_calls(), 0);
  });
}

TEST(ColumnRowMlpErrors, SecondDerivativesAreNotSupported) {
  const auto block = Block::random(true, false, 4, 6, at::kDouble);
  const auto x = at::ones({3, 4}, at::kDouble).requires_grad_();
  const auto y = ops::column_row_mlp(x, block.weights(), "silu", "");
  EXPECT_EQ(error_of([&] {
              torch::autograd::grad(
                  {y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
            }),
            "weft::column_row_mlp: got a backward with create_graph=True, but this operator has no "
            "second "
            "derivative; call backward without create_graph.");
}

TEST(ColumnRowMlpDtypes, AreCloseToFloat64) {
  run_ranks(2, [](RankContext& ctx) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      // Not from the random generator, which the ranks of this process share.
      const auto options = at::TensorOptions(at::kDouble);
      const auto draw = [&](at::IntArrayRef shape, int64_t offset) {
        const auto count = c10::multiply_integers(shape);
        return at::sin(at::arange(offset, offset + count, options) * 1.7).reshape(shape) * 0.5;
      };
      const Block full = {draw({10, 8}, 0), draw({8, 10}, 100), draw({10, 8}, 200), {}, {}, {}};
      const auto x = draw({4, 8}, 300);
      const auto y = full.forward(x, "silu");
      const auto local = full.sharded(2, ctx.group_rank);
      const ops::ColumnRowMlpWeights weights = {
          local.w1.detach().to(dtype), local.w2.detach().to(dtype), local.w3.detach().to(dtype)};
      const auto out = ops::column_row_mlp(x.to(dtype), weights, "silu", ctx.group_name);
      EXPECT_EQ(out.scalar_type(), dtype);
      expect_close(out.to(at::kDouble), y, dtype == at::kFloat ? 1e-6 : 3e-2, toString(dtype));
    }
  });
}

}  // namespace
}  // namespace weft::testing
