// Pipeline messages from C++: compares stages with the full model. Ranks are threads.
#include "reference.h"
#include "support/thread_ranks.h"

#include <weft/ops/operators.h>

#include <gtest/gtest.h>

#include <vector>

namespace weft::testing {
namespace {

class Pipeline : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { at::manual_seed(7); }
};

INSTANTIATE_TEST_SUITE_P(Ranks, Pipeline, ::testing::Values(2, 3, 4));

TEST_P(Pipeline, StagesEqualTheFullModel) {
  const auto x = at::randn({4, 6}, at::kDouble);
  std::vector<at::Tensor> weights;
  auto y = x;
  for (int stage = 0; stage < GetParam(); ++stage) {
    weights.push_back(at::randn({6, 6}, at::kDouble).requires_grad_());
    y = at::linear(y, weights.back()).tanh();
  }
  y.sum().backward();
  run_ranks(GetParam(), [&](RankContext& ctx) {
    const int rank = ctx.group_rank;
    const auto weight =
        weights.at(static_cast<std::size_t>(rank)).detach().clone().requires_grad_();
    auto input = x;
    if (rank > 0) {
      const auto like = at::empty({}, at::kDouble).requires_grad_().expand({4, 6});
      input = ops::pipeline_wait(ops::pipeline_recv({like}, rank - 1, 0, ctx.group_name)).at(0);
    }
    const auto out = at::linear(input, weight).tanh();
    auto loss = out.sum();
    if (rank + 1 < ctx.group_size) {
      const auto token = ops::pipeline_send({out}, rank + 1, 0, ctx.group_name);
      loss = ops::join(at::zeros({}, at::kDouble), {token});
    }
    loss.backward();
    ops::pipeline_flush(ctx.group_name);
    expect_close(
        weight.grad(), weights.at(static_cast<std::size_t>(rank)).grad(), 1e-12, "grad weight");
  });
}

}  // namespace
}  // namespace weft::testing
