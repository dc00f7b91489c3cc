// The errors of run_ranks when ranks fail, make different calls, end early or are missing.
#include "support_calls.h"

#include <atomic>
#include <future>
#include <stdexcept>
#include <thread>

namespace weft::testing {
namespace {

// Returns the message of the error that run_ranks throws; fails the test if it throws none.
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

TEST(FailingRanks, TheFirstFailureIsReported) {
  const std::string text = failure_of(4, [](RankContext& ctx) {
    if (ctx.group_rank == 3) {
      std::this_thread::sleep_for(milliseconds(20));
      throw std::logic_error("the cause");
    }
    ctx.process_group->barrier()->wait();
  });
  EXPECT_EQ(text, "rank 3 of 4 failed: the cause");
}

TEST(FailingRanks, ATimeoutNamesTheMissingRank) {
  std::promise<void> seen;
  RankOptions options;
  options.group.timeout = milliseconds(50);
  run_ranks(
      3,
      [&](RankContext& ctx) {
        if (ctx.group_rank == 1) {  // alive, but does not call the collective
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

TEST(FailingRanks, AWorkWithoutAWaitIsAFailure) {
  const auto body = [](RankContext& ctx) {
    const auto work = all_reduce(ctx, filled(1));
    if (ctx.group_rank == 0) {
      work->wait();
    }
  };
  EXPECT_EQ(
      failure_of(2, body),
      "rank 1 of 2 failed: there was no wait for all_reduce(sum, Float[3, 2]), operation 0, on "
      "rank 1 of 2 (1 in all)");
  RankOptions options;
  options.require_waits = false;
  run_ranks(2, body, options);
}

TEST(BadTensors, RaiseBeforeAnythingIsSent) {
  run_ranks(2, [](RankContext& ctx) {
    const std::string rank = " on rank " + std::to_string(ctx.group_rank);
    EXPECT_HAS(
        error_of([&] { all_reduce(ctx, filled(1).t()); }),
        "all_reduce" + rank + ": the tensor is not contiguous; pass a contiguous CPU tensor");
    EXPECT_HAS(error_of([&] { all_reduce(ctx, filled(1, at::kLong), ReduceOp::AVG); }),
               "cannot compute the avg of Long");
    EXPECT_HAS(error_of([&] { all_reduce(ctx, filled(1, at::kLong), ReduceOp::BAND); }),
               "is not supported by this backend");
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
