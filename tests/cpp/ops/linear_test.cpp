// Compares column_linear and row_linear with the unsharded layer. Ranks are threads.
#include "reference.h"
#include "support/thread_ranks.h"

#include <weft/ops/operators.h>

#include <gtest/gtest.h>

#include <string>
#include <tuple>

namespace weft::testing {
namespace {

struct Layer {
  at::Tensor x, weight, bias, y, grad_y;

  static Layer random(bool with_bias) {
    at::manual_seed(5);
    Layer layer;
    layer.x = at::randn({2, 3, 5}, at::kDouble).requires_grad_();
    layer.weight = at::randn({7, 5}, at::kDouble).requires_grad_();
    if (with_bias) layer.bias = at::randn({7}, at::kDouble).requires_grad_();
    layer.grad_y = at::randn({2, 3, 7}, at::kDouble);
    layer.y = at::linear(layer.x, layer.weight, layer.bias);
    layer.y.backward(layer.grad_y);
    return layer;
  }
};

at::Tensor narrow_to_rank(const at::Tensor& full, int64_t dim, const RankContext& ctx) {
  const auto [start, length] = shard_range(full.size(dim), ctx.group_size, ctx.group_rank);
  return full.narrow(dim, start, length);
}

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

class Linear : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(Linear, ColumnEqualsItsRowsOfTheUnshardedLayer) {
  const auto [num_ranks, with_bias] = GetParam();
  const auto full = Layer::random(with_bias);
  run_ranks(num_ranks, [&](RankContext& ctx) {
    const auto x = full.x.detach().clone().requires_grad_();
    const auto weight = shard(full.weight, 0, ctx.group_size, ctx.group_rank);
    const auto bias =
        with_bias ? shard(full.bias, 0, ctx.group_size, ctx.group_rank) : at::Tensor();
    const auto y = ops::column_linear(x, weight, optional(bias), ctx.group_name);
    expect_close(y, narrow_to_rank(full.y, -1, ctx), 1e-12, "y");
    EXPECT_EQ(ctx.backend->num_calls(), 0);
    y.backward(narrow_to_rank(full.grad_y, -1, ctx));
    EXPECT_EQ(ctx.backend->count(Collective::kAllReduce).num_calls, ctx.group_size > 1 ? 1 : 0);
    expect_close(x.grad(), full.x.grad(), 1e-12, "grad x");
    expect_close(weight.grad(), narrow_to_rank(full.weight.grad(), 0, ctx), 1e-12, "grad weight");
    if (with_bias) {
      expect_close(bias.grad(), narrow_to_rank(full.bias.grad(), 0, ctx), 1e-12, "grad bias");
    }
  });
}

TEST_P(Linear, RowEqualsTheUnshardedLayerWithItsBiasOnce) {
  const auto [num_ranks, with_bias] = GetParam();
  const auto full = Layer::random(with_bias);
  run_ranks(num_ranks, [&](RankContext& ctx) {
    const auto x = shard(full.x, -1, ctx.group_size, ctx.group_rank);
    const auto weight = shard(full.weight, 1, ctx.group_size, ctx.group_rank);
    const auto bias = with_bias ? full.bias.detach().clone().requires_grad_() : at::Tensor();
    const auto y = ops::row_linear(x, weight, optional(bias), ctx.group_name);
    expect_close(y, full.y, 1e-12, "y");
    y.backward(full.grad_y);
    EXPECT_EQ(ctx.backend->num_calls(), ctx.group_size > 1 ? 1 : 0);
    expect_close(x.grad(), narrow_to_rank(full.x.grad(), -1, ctx), 1e-12, "grad x");
    expect_close(weight.grad(), narrow_to_rank(full.weight.grad(), 1, ctx), 1e-12, "grad weight");
    if (with_bias) expect_close(bias.grad(), full.bias.grad(), 1e-12, "grad bias");
  });
}

std::string linear_case_name(const ::testing::TestParamInfo<std::tuple<int, bool>>& info) {
  const auto [ranks, with_bias] = info.param;
  return std::to_string(ranks) + "ranks" + (with_bias ? "_bias" : "");
}

INSTANTIATE_TEST_SUITE_P(All,
                         Linear,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Bool()),
                         linear_case_name);

TEST(LinearCommunication, ColumnWithoutInputGradientSendsNothing) {
  run_ranks(2, [](RankContext& ctx) {
    const auto weight = at::ones({3, 4}).requires_grad_();
    ops::column_linear(at::ones({2, 4}), weight, {}, ctx.group_name).sum().backward();
    EXPECT_EQ(ctx.backend->num_calls(), 0);
    EXPECT_TRUE(weight.grad().defined());
  });
}

TEST(LinearCommunication, ColumnWaitsForALateAllReduce) {
  const auto full = Layer::random(false);
  RankOptions options;
  options.group.all_reduce_delay = std::chrono::milliseconds(50);
  run_ranks(
      2,
      [&](RankContext& ctx) {
        const auto x = full.x.detach().clone().requires_grad_();
        const auto weight = shard(full.weight, 0, 2, ctx.group_rank);
        ops::column_linear(x, weight, {}, ctx.group_name)
            .backward(narrow_to_rank(full.grad_y, -1, ctx));
        expect_close(x.grad(), full.x.grad(), 1e-12, "grad x");
      },
      options);
}

TEST(LinearErrors, AreOneSentenceBeforeAnyCommunication) {
  run_ranks(2, [](RankContext& ctx) {
    const auto x = at::ones({2, 4});
    const auto column = [&](const at::Tensor& weight, const std::string& group) {
      return error_of([&] { ops::column_linear(x, weight, {}, group); });
    };
    const auto row = [&](const at::Tensor& weight, const at::Tensor& bias) {
      return error_of([&] { ops::row_linear(x, weight, bias, ctx.group_name); });
    };
    EXPECT_EQ(
        column(at::ones({3, 5}), ctx.group_name),
        "weft::column_linear: got weight of shape [3, 5], whose second dim must be 4, the last dim "
        "of x; pass this rank's shard in nn.Linear's layout [out, in].");
    EXPECT_EQ(
        column(at::ones({4}), ctx.group_name),
        "weft::column_linear: got weight of shape [4]; pass a matrix [out, in] as nn.Linear holds "
        "it.");
    EXPECT_NE(column(at::ones({3, 4}), "nowhere").find("got group_name 'nowhere'"),
              std::string::npos);
    EXPECT_EQ(
        row(at::ones({3, 4}), at::ones({4})),
        "weft::row_linear: got bias of shape [4], which must be [3], one entry for each row of "
        "weight; shard bias and weight alike.");
    EXPECT_EQ(
        row(at::ones({3, 4}, at::kHalf), at::ones({3})),
        "weft::row_linear: got weight of dtype Half with x of dtype Float; convert one of them, or "
        "run under torch.autocast.");
    EXPECT_EQ(ctx.backend->num_calls(), 0);
  });
}

}  // namespace
}  // namespace weft::testing
