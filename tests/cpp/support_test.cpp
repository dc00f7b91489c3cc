// Tests support/thread_ranks.h itself: every collective and the counters.
#include "support_calls.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <tuple>
#include <utility>

namespace weft::testing {
namespace {

class CollectiveTest : public ::testing::TestWithParam<std::tuple<int, at::ScalarType>> {
 protected:
  int num_ranks() const { return std::get<0>(GetParam()); }
  at::ScalarType dtype() const { return std::get<1>(GetParam()); }
};

TEST_P(CollectiveTest, AllReduce) {
  const int n = num_ranks();
  run_ranks(n, [&](RankContext& ctx) {
    const double mine = ctx.group_rank + 1;
    double sum = 0;
    double product = 1;
    for (int rank = 1; rank <= n; ++rank) {
      sum += rank;
      product *= rank;
    }
    std::vector<std::pair<ReduceOp::RedOpType, double>> cases = {{ReduceOp::SUM, sum},
                                                                 {ReduceOp::PRODUCT, product},
                                                                 {ReduceOp::MIN, 1.0},
                                                                 {ReduceOp::MAX, n}};
    if (dtype() != at::kLong) {
      cases.emplace_back(ReduceOp::AVG, sum / n);
    }
    for (const auto& [reduce_op, expected] : cases) {
      const at::Tensor x = filled(mine, dtype());
      EXPECT_TRUE(all_reduce(ctx, x, reduce_op)->wait());
      EXPECT_TRUE(at::equal(x, filled(expected, dtype()))) << "reduce op " << int{reduce_op};
    }
  });
}

TEST_P(CollectiveTest, Broadcast) {
  for (int root = 0; root < num_ranks(); ++root) {
    run_ranks(num_ranks(), [&](RankContext& ctx) {
      Tensors tensors{filled(ctx.group_rank + 10, dtype())};
      c10d::BroadcastOptions opts;
      opts.rootRank = root;
      ctx.process_group->broadcast(tensors, opts)->wait();
      EXPECT_TRUE(at::equal(tensors[0], filled(root + 10, dtype())));
    });
  }
}

TEST_P(CollectiveTest, AllGather) {
  const int n = num_ranks();
  run_ranks(n, [&](RankContext& ctx) {
    Tensors inputs{filled(ctx.group_rank, dtype())};
    std::vector<Tensors> outputs(1);
    for (int rank = 0; rank < n; ++rank) {
      outputs[0].push_back(filled(-1, dtype()));
    }
    ctx.process_group->allgather(outputs, inputs)->wait();
    at::Tensor flat = filled(-1, dtype(), {3 * n, 2});
    all_gather_flat(*ctx.process_group, flat, inputs[0])->wait();
    for (int rank = 0; rank < n; ++rank) {
      const at::Tensor expected = filled(rank, dtype());
      EXPECT_TRUE(at::equal(outputs[0].at(static_cast<size_t>(rank)), expected));
      EXPECT_TRUE(at::equal(flat.narrow(0, 3 * rank, 3), expected));
    }
  });
}

TEST_P(CollectiveTest, ReduceScatter) {
  const int n = num_ranks();
  run_ranks(n, [&](RankContext& ctx) {
    // Rank r's input for rank k is 10 r + k.
    std::vector<Tensors> inputs(1);
    for (int to = 0; to < n; ++to) {
      inputs[0].push_back(filled(10 * ctx.group_rank + to, dtype()));
    }
    const double expected = 10.0 * n * (n - 1) / 2 + n * ctx.group_rank;
    Tensors outputs{filled(-1, dtype())};
    ctx.process_group->reduce_scatter(outputs, inputs)->wait();
    EXPECT_TRUE(at::equal(outputs[0], filled(expected, dtype())));
    at::Tensor flat = at::cat(inputs[0]);
    at::Tensor output = filled(-1, dtype());
    reduce_scatter_flat(*ctx.process_group, output, flat)->wait();
    EXPECT_TRUE(at::equal(output, filled(expected, dtype())));
  });
}

INSTANTIATE_TEST_SUITE_P(
    RanksAndDtypes,
    CollectiveTest,
    ::testing::Combine(
        ::testing::Values(1, 2, 3, 4),
        ::testing::Values(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong)),
    [](const auto& test) {
      return "Ranks" + std::to_string(std::get<0>(test.param)) + toString(std::get<1>(test.param));
    });

TEST(ThreadRanks, EmptyTensorsAreAccepted) {
  run_ranks(2, [](RankContext& ctx) {
    const at::Tensor empty = at::empty({0, 4});
    all_reduce(ctx, empty)->wait();
    at::Tensor gathered = at::empty({0, 4});
    at::Tensor input = empty;
    all_gather_flat(*ctx.process_group, gathered, input)->wait();
    EXPECT_EQ(ctx.backend->count(Collective::kAllReduce), (CallCount{1, 0}));
  });
}

TEST(ThreadRanks, HalfPrecisionIsRoundedOnce) {
  run_ranks(3, [](RankContext& ctx) {
    // In bfloat16 256 + 1 is 256: rounding after each addition would lose both ones.
    const at::Tensor x = filled(ctx.group_rank == 0 ? 256 : 1, at::kBFloat16);
    all_reduce(ctx, x)->wait();
    EXPECT_TRUE(at::equal(x, filled(258, at::kBFloat16)));
  });
}

TEST(ThreadRanks, BarrierWaitsForEveryRank) {
  for (const int n : {1, 2, 3, 4}) {
    std::atomic<int> num_arrived = 0;
    run_ranks(n, [&](RankContext& ctx) {
      std::this_thread::sleep_for(milliseconds(5 * ctx.group_rank));
      ++num_arrived;
      ctx.process_group->barrier()->wait();
      EXPECT_EQ(num_arrived, n);
    });
  }
}

TEST(ThreadRanks, SendsMatchReceivesByPeerAndTag) {
  for (const int n : {2, 3, 4}) {
    run_ranks(n, [&](RankContext& ctx) {
      const int next = (ctx.group_rank + 1) % n;
      const int previous = (ctx.group_rank + n - 1) % n;
      Tensors first{filled(ctx.group_rank)};
      Tensors second{filled(ctx.group_rank + 100)};
      Tensors got_first{filled(-1)};
      Tensors got_second{filled(-1)};
      auto& group = *ctx.process_group;
      // Received in the opposite order: only the tags distinguish them.
      std::vector<c10::intrusive_ptr<c10d::Work>> works = {group.send(first, next, 1),
                                                           group.send(second, next, 2),
                                                           group.recv(got_second, previous, 2),
                                                           group.recv(got_first, previous, 1)};
      for (const auto& work : works) {
        EXPECT_TRUE(work->wait());
      }
      EXPECT_TRUE(at::equal(got_first[0], filled(previous)));
      EXPECT_TRUE(at::equal(got_second[0], filled(previous + 100)));
      EXPECT_EQ(ctx.backend->count(Collective::kSend), (CallCount{2, 48}));
      EXPECT_EQ(ctx.backend->count(Collective::kRecv), (CallCount{2, 48}));
    });
  }
}

TEST(ThreadRanks, CountsCallsAndBytes) {
  run_ranks(2, [](RankContext& ctx) {
    const at::Tensor x = filled(1, at::kDouble, {5});
    all_reduce(ctx, x)->wait();
    all_reduce(ctx, x)->wait();
    at::Tensor gathered = filled(0, at::kDouble, {10});
    at::Tensor input = x;
    all_gather_flat(*ctx.process_group, gathered, input)->wait();
    EXPECT_EQ(ctx.backend->count(Collective::kAllReduce), (CallCount{2, 80}));
    EXPECT_EQ(ctx.backend->count(Collective::kAllGather), (CallCount{1, 40}));
    EXPECT_EQ(ctx.backend->count(Collective::kBroadcast), (CallCount{0, 0}));
    EXPECT_EQ(ctx.backend->num_calls(), 3);
    ctx.backend->reset_counts();
    EXPECT_EQ(ctx.backend->num_calls(), 0);
  });
}

TEST(ThreadRanks, GroupNameResolvesToTheGroupOfTheRank) {
  RankOptions options;
  options.group_name = "some_group";
  run_ranks(
      3,
      [](RankContext& ctx) {
        const auto group = c10d::resolve_process_group("some_group");
        EXPECT_EQ(group->getRank(), ctx.group_rank);
        EXPECT_EQ(group->getSize(), 3);
        EXPECT_EQ(group->getGroupName(), "some_group");
        EXPECT_EQ(group.get(), ctx.process_group.get());
      },
      options);
  EXPECT_THROW(c10d::resolve_process_group("some_group"), c10::Error);
}

// Sums over the group in the backward, like the input gradient of a column-parallel layer.
struct CopyToGroup : torch::autograd::Function<CopyToGroup> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*ctx*/, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* /*ctx*/,
                                               const torch::autograd::tensor_list& grads) {
    Tensors tensors{grads[0].clone()};
    c10d::resolve_process_group("tensor_parallel")->allreduce(tensors)->wait();
    return {tensors[0]};
  }
};

TEST(ThreadRanks, BackwardFindsTheGroupOfItsRank) {
  run_ranks(3, [](RankContext& ctx) {
    at::Tensor x = at::ones({4}).requires_grad_();
    (CopyToGroup::apply(x) * (ctx.group_rank + 1)).sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), filled(6, at::kFloat, {4})));
    EXPECT_EQ(ctx.backend->count(Collective::kAllReduce).num_calls, 1);
  });
}

TEST(ThreadRanks, ResultsBumpNoVersionCounter) {
  run_ranks(2, [](RankContext& ctx) {
    const at::Tensor x = filled(1);
    Tensors tensors{x};
    const auto version = x._version();
    ctx.backend->allreduce(tensors)->wait();
    EXPECT_EQ(x._version(), version);
    EXPECT_TRUE(at::equal(x, filled(2)));
  });
}

TEST(DelayedAllReduce, IsNotCompleteBeforeTheWait) {
  RankOptions options;
  options.group.all_reduce_delay = milliseconds(100);
  run_ranks(
      2,
      [](RankContext& ctx) {
        const at::Tensor x = filled(1);
        const auto start = std::chrono::steady_clock::now();
        const auto work = all_reduce(ctx, x);
        EXPECT_FALSE(work->isCompleted());
        EXPECT_TRUE(at::equal(x, filled(1))) << "the input, until the all-reduce is complete";
        work->wait();
        EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(90));
        EXPECT_TRUE(work->isCompleted());
        EXPECT_TRUE(at::equal(x, filled(2)));
      },
      options);
}

TEST(DelayedAllReduce, ReadsItsInputWhenItCompletes) {
  RankOptions options;
  options.group.all_reduce_delay = milliseconds(50);
  run_ranks(
      2,
      [](RankContext& ctx) {
        const at::Tensor x = filled(1);
        const auto work = all_reduce(ctx, x);
        x.fill_(7);  // the bug that this option reveals
        work->wait();
        EXPECT_TRUE(at::equal(x, filled(14)));
      },
      options);
}

TEST(DelayedAllReduce, TimesOutAndEndsWithoutAWait) {
  RankOptions options;
  options.group.all_reduce_delay = milliseconds(60'000);
  options.require_waits = false;
  const auto start = std::chrono::steady_clock::now();
  run_ranks(
      2,
      [](RankContext& ctx) {
        const auto work = all_reduce(ctx, filled(1));
        EXPECT_HAS(error_of([&] { work->wait(milliseconds(20)); }), "every rank has called it");
        all_reduce(ctx, filled(2));
      },
      options);
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(20'000));
}

}  // namespace
}  // namespace weft::testing
