// The ranks-as-threads themselves: every collective, the counters, and what a test gets to read
// when ranks fail, disagree, end early or never come.
#include "support/thread_ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <atomic>
#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

namespace weft::testing {
namespace {

using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using std::chrono::milliseconds;

at::Tensor filled(double value, at::ScalarType dtype = at::kFloat, at::IntArrayRef shape = {3, 2}) {
  return at::full(shape, value, at::TensorOptions(dtype));
}

c10::intrusive_ptr<c10d::Work> all_reduce(RankContext& ctx,
                                          const at::Tensor& tensor,
                                          ReduceOp::RedOpType reduce_op = ReduceOp::SUM) {
  Tensors tensors{tensor};
  c10d::AllreduceOptions opts;
  opts.reduceOp = reduce_op;
  return ctx.process_group->allreduce(tensors, opts);
}

// Newer c10d has new names for these two and deprecates the old ones.
template <typename Group>
c10::intrusive_ptr<c10d::Work> all_gather_flat(Group& group,
                                               at::Tensor& output,
                                               at::Tensor& input) {
  if constexpr (requires { group.all_gather_single(output, input); }) {
    return group.all_gather_single(output, input);
  } else {
    return group._allgather_base(output, input);
  }
}

template <typename Group>
c10::intrusive_ptr<c10d::Work> reduce_scatter_flat(Group& group,
                                                   at::Tensor& output,
                                                   at::Tensor& input) {
  if constexpr (requires { group.reduce_scatter_single(output, input); }) {
    return group.reduce_scatter_single(output, input);
  } else {
    return group._reduce_scatter_base(output, input);
  }
}

// The message of what `body` makes run_ranks throw; fails the test when it throws nothing.
std::string failure_of(int num_ranks,
                       const std::function<void(RankContext&)>& body,
                       const RankOptions& options = {}) {
  try {
    run_ranks(num_ranks, body, options);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no rank failed";
  return "";
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

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
    // Rank r puts 10 r + k in for rank k.
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

TEST(ThreadRanks, EmptyTensorsTakePart) {
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

TEST(ThreadRanks, BarrierHoldsEveryRankBack) {
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

TEST(ThreadRanks, SendsMeetReceivesByPeerAndTag) {
  for (const int n : {2, 3, 4}) {
    run_ranks(n, [&](RankContext& ctx) {
      const int next = (ctx.group_rank + 1) % n;
      const int previous = (ctx.group_rank + n - 1) % n;
      Tensors first{filled(ctx.group_rank)};
      Tensors second{filled(ctx.group_rank + 100)};
      Tensors got_first{filled(-1)};
      Tensors got_second{filled(-1)};
      auto& group = *ctx.process_group;
      // Received in the other order: only the tags tell them apart.
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

TEST(ThreadRanks, GroupNameResolvesToTheOwnRank) {
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

// Sums over the group in backward: the shape of a column-parallel layer's input.
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
        EXPECT_TRUE(at::equal(x, filled(1))) << "the input until it is complete";
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
        x.fill_(7);  // the bug that this option shows
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

TEST(FailingRanks, AThrowingRankIsNamedAndReleasesTheOthers) {
  for (const int bad_rank : {0, 2}) {
    const auto start = std::chrono::steady_clock::now();
    const std::string text = failure_of(3, [&](RankContext& ctx) {
      TORCH_CHECK(ctx.group_rank != bad_rank, "no weights here");
      const std::string seen = error_of([&] { all_reduce(ctx, filled(1))->wait(); });
      EXPECT_HAS(seen, "rank " + std::to_string(bad_rank) + " failed: no weights here");
      EXPECT_HAS(seen, "on rank " + std::to_string(ctx.group_rank) + " of 3");
    });
    EXPECT_EQ(text, "rank " + std::to_string(bad_rank) + " of 3 failed: no weights here");
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(10'000));
  }
}

TEST(FailingRanks, TheCauseComesBeforeWhatFollowsFromIt) {
  const std::string text = failure_of(4, [](RankContext& ctx) {
    if (ctx.group_rank == 3) {
      std::this_thread::sleep_for(milliseconds(20));
      throw std::logic_error("the cause");
    }
    ctx.process_group->barrier()->wait();
  });
  EXPECT_EQ(text, "rank 3 of 4 failed: the cause");
}

TEST(FailingRanks, AMissingRankTimesOutByName) {
  std::promise<void> seen;
  RankOptions options;
  options.group.timeout = milliseconds(50);
  run_ranks(
      3,
      [&](RankContext& ctx) {
        if (ctx.group_rank == 1) {  // alive, but elsewhere
          seen.get_future().wait();
          return;
        }
        const auto work = all_reduce(ctx, filled(1, at::kFloat, {4}));
        const std::string own = "on rank " + std::to_string(ctx.group_rank) + " of 3";
        const std::string text = error_of([&] { work->wait(); });
        EXPECT_HAS(text, "all_reduce(sum, Float[4]), operation 0, " + own);
        EXPECT_HAS(text, "not complete after 50 ms; not called so far by rank 1");
        if (ctx.group_rank == 0) {
          Tensors tensors{filled(1)};
          const std::string p2p = error_of([&] { ctx.process_group->recv(tensors, 1, 5)->wait(); });
          EXPECT_HAS(p2p, "recv from rank 1 with tag 5, on rank 0 of 3: not complete after 50 ms");
          // Rank 2 may still be waiting for its own time-out.
          std::this_thread::sleep_for(milliseconds(500));
          seen.set_value();
        }
      },
      options);
}

TEST(FailingRanks, ARankThatEndsEarlyReleasesTheOthersAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  const std::string text = failure_of(2, [](RankContext& ctx) {
    if (ctx.group_rank == 0) {
      Tensors tensors{filled(1)};
      const std::string p2p = error_of([&] { ctx.process_group->recv(tensors, 1, 0)->wait(); });
      EXPECT_HAS(p2p, "rank 1 has ended");
      all_reduce(ctx, filled(1))->wait();
    }
  });
  EXPECT_HAS(text, "rank 0 of 2 failed: all_reduce(sum, Float[3, 2])");
  EXPECT_HAS(text, "rank 1 has ended");
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(10'000));
}

TEST(FailingRanks, DifferentCallsFailOnEveryRank) {
  std::atomic<int> num_seen = 0;
  run_ranks(2, [&](RankContext& ctx) {
    const auto shapes =
        error_of([&] { all_reduce(ctx, filled(1, at::kFloat, {2 + ctx.group_rank}))->wait(); });
    EXPECT_HAS(shapes,
               "rank 0 called all_reduce(sum, Float[2]), rank 1 called all_reduce(sum, Float[3])");
    const auto dtypes = error_of(
        [&] { all_reduce(ctx, filled(1, ctx.group_rank == 0 ? at::kFloat : at::kLong))->wait(); });
    EXPECT_HAS(dtypes, "rank 1 called all_reduce(sum, Long[3, 2])");
    const auto kinds = error_of([&] {
      (ctx.group_rank == 0 ? all_reduce(ctx, filled(1)) : ctx.process_group->barrier())->wait();
    });
    EXPECT_HAS(kinds, "rank 1 called barrier()");
    Tensors tensors{filled(1, at::kFloat, {2 + ctx.group_rank})};
    auto& group = *ctx.process_group;
    const auto p2p = error_of([&] {
      (ctx.group_rank == 0 ? group.send(tensors, 1, 0) : group.recv(tensors, 0, 0))->wait();
    });
    EXPECT_HAS(p2p, "Float[2] was sent where Float[3] is received");
    ++num_seen;
  });
  EXPECT_EQ(num_seen, 2);
}

TEST(FailingRanks, AWorkNobodyWaitsForIsAFailure) {
  const auto body = [](RankContext& ctx) {
    const auto work = all_reduce(ctx, filled(1));
    if (ctx.group_rank == 0) {
      work->wait();
    }
  };
  EXPECT_EQ(
      failure_of(2, body),
      "rank 1 of 2 failed: nobody waited for all_reduce(sum, Float[3, 2]), operation 0, on rank 1 "
      "of 2 (1 in all)");
  RankOptions options;
  options.require_waits = false;
  run_ranks(2, body, options);
}

TEST(BadTensors, AreRefusedBeforeAnythingIsSent) {
  run_ranks(2, [](RankContext& ctx) {
    const std::string rank = " on rank " + std::to_string(ctx.group_rank);
    EXPECT_HAS(
        error_of([&] { all_reduce(ctx, filled(1).t()); }),
        "all_reduce" + rank + ": the tensor is not contiguous; pass a contiguous CPU tensor");
    EXPECT_HAS(error_of([&] { all_reduce(ctx, filled(1, at::kLong), ReduceOp::AVG); }),
               "cannot take the avg of Long");
    EXPECT_HAS(error_of([&] { all_reduce(ctx, filled(1, at::kLong), ReduceOp::BAND); }),
               "is not known to this backend");
    at::Tensor output = filled(0);
    at::Tensor input = filled(0);
    EXPECT_HAS(error_of([&] { all_gather_flat(*ctx.process_group, output, input); }),
               "output Float[3, 2] for input Float[3, 2] on 2 ranks");
    EXPECT_HAS(error_of([&] { reduce_scatter_flat(*ctx.process_group, output, input); }),
               "input Float[3, 2] for output Float[3, 2] on 2 ranks");
    Tensors tensors{filled(1)};
    EXPECT_HAS(error_of([&] { ctx.process_group->send(tensors, ctx.group_rank, 0); }),
               "the peer must be another rank of the group");
    EXPECT_EQ(ctx.backend->num_calls(), 0);
  });
  EXPECT_HAS(error_of([] { run_ranks(0, [](RankContext&) {}); }), "got 0 ranks");
}

}  // namespace
}  // namespace weft::testing
