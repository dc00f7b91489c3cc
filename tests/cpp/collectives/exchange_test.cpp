// Every collective against what it should give, on 1 to 5 ranks, from nothing to many chunks.
#include "ranks.h"
#include "reductions.h"

#include <numeric>
#include <tuple>

namespace weft::collectives::testing {
namespace {

using Values = std::vector<float>;

// Rank r's element i: small integers, so that every order of adding gives the same.
Values values_of(int rank, int64_t size) {
  Values values(static_cast<size_t>(size));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>((static_cast<size_t>(rank) + 1) * (i % 97 + 1));
  }
  return values;
}

Values sum_over(int num_ranks, int64_t size) {
  Values total(static_cast<size_t>(size), 0.F);
  for (int rank = 0; rank < num_ranks; ++rank) {
    const Values values = values_of(rank, size);
    for (size_t i = 0; i < total.size(); ++i) total[i] += values[i];
  }
  return total;
}

class Exchange : public ::testing::TestWithParam<std::tuple<int, int64_t>> {
 protected:
  int num_ranks() const { return std::get<0>(GetParam()); }
  int64_t size() const { return std::get<1>(GetParam()); }
  int root() const { return num_ranks() / 2; }

  // Staging of a page or so: sizes above make many chunks.
  template <typename Body>
  void run(const Body& body) {
    GroupOptions options = group_of(1, 0);
    options.staging_limit_bytes = 128 * 1024;
    run_threads(num_ranks(), body, options);
  }
};

TEST_P(Exchange, AllReduce) {
  run([&](Engine& engine, int rank) {
    Values values = values_of(rank, size());
    for (int repeat = 0; repeat < 3; ++repeat) {
      Values result(values.size());
      complete(engine,
               make_all_reduce(
                   {DType::kFloat32, {size()}}, ReduceOp::kSum, input(values), output(result)));
      EXPECT_EQ(result, sum_over(num_ranks(), size()));
    }
    complete(engine,
             make_all_reduce(
                 {DType::kFloat32, {size()}}, ReduceOp::kSum, input(values), output(values)));
    EXPECT_EQ(values, sum_over(num_ranks(), size())) << "in place";
  });
}

TEST_P(Exchange, Reduce) {
  run([&](Engine& engine, int rank) {
    Values values = values_of(rank, size());
    complete(engine,
             make_reduce({DType::kFloat32, {size()}},
                         ReduceOp::kSum,
                         input(values),
                         output(values),
                         root(),
                         rank));
    EXPECT_EQ(values, rank == root() ? sum_over(num_ranks(), size()) : values_of(rank, size()));
  });
}

TEST_P(Exchange, ReduceScatterOfUnevenShares) {
  run([&](Engine& engine, int rank) {
    std::vector<Values> shares;
    std::vector<Input> inputs;
    for (int peer = 0; peer < num_ranks(); ++peer) shares.push_back(values_of(rank, size() + peer));
    for (Values& share : shares) inputs.push_back(input(share));
    Values result(static_cast<size_t>(size() + rank));
    complete(engine,
             make_reduce_scatter(DType::kFloat32, ReduceOp::kSum, inputs, output(result), rank));
    EXPECT_EQ(result, sum_over(num_ranks(), size() + rank));
  });
}

TEST_P(Exchange, AllGatherOfUnevenInputs) {
  run([&](Engine& engine, int rank) {
    Values values = values_of(rank, size() + rank);
    std::vector<Values> results;
    std::vector<Output> outputs;
    for (int peer = 0; peer < num_ranks(); ++peer) {
      results.emplace_back(static_cast<size_t>(size() + peer));
    }
    for (Values& result : results) outputs.push_back(output(result));
    complete(engine, make_all_gather(DType::kFloat32, input(values), outputs));
    for (int peer = 0; peer < num_ranks(); ++peer) {
      EXPECT_EQ(results[static_cast<size_t>(peer)], values_of(peer, size() + peer));
    }
  });
}

TEST_P(Exchange, Broadcast) {
  run([&](Engine& engine, int rank) {
    Values values = values_of(rank, size());
    complete(engine, make_broadcast({DType::kFloat32, {size()}}, output(values), root(), rank));
    EXPECT_EQ(values, values_of(root(), size()));
  });
}

TEST_P(Exchange, GatherAndScatter) {
  run([&](Engine& engine, int rank) {
    Values values = values_of(rank, size());
    std::vector<Values> all;
    std::vector<Output> outputs;
    std::vector<Input> inputs;
    if (rank == root()) {
      all.assign(static_cast<size_t>(num_ranks()), Values(values.size()));
      for (Values& each : all) outputs.push_back(output(each));
    }
    complete(engine,
             make_gather(DType::kFloat32, input(values), outputs, root(), rank, num_ranks()));
    for (size_t peer = 0; peer < all.size(); ++peer) {
      EXPECT_EQ(all[peer], values_of(static_cast<int>(peer), size()));
      inputs.push_back(input(all[peer]));
    }
    Values back(values.size());
    complete(engine,
             make_scatter(DType::kFloat32, inputs, output(back), root(), rank, num_ranks()));
    EXPECT_EQ(back, values);
  });
}

TEST_P(Exchange, AllToAllWithSplits) {
  run([&](Engine& engine, int rank) {
    std::vector<Values> given;
    std::vector<Values> taken;
    std::vector<Input> inputs;
    std::vector<Output> outputs;
    for (int peer = 0; peer < num_ranks(); ++peer) {
      given.push_back(values_of(10 * rank + peer, size() + 2 * rank + peer));
      taken.emplace_back(static_cast<size_t>(size() + 2 * peer + rank));
    }
    for (Values& each : given) inputs.push_back(input(each));
    for (Values& each : taken) outputs.push_back(output(each));
    complete(engine, make_all_to_all(DType::kFloat32, inputs, outputs));
    for (int peer = 0; peer < num_ranks(); ++peer) {
      EXPECT_EQ(taken[static_cast<size_t>(peer)],
                values_of(10 * peer + rank, size() + 2 * peer + rank));
    }
  });
}

TEST_P(Exchange, ManyAtOnceKeepTheirOrder) {
  run([&](Engine& engine, int rank) {
    std::vector<Values> values(20, values_of(rank, size()));
    std::vector<CollectivePtr> pending;
    for (Values& each : values) {
      pending.push_back(
          make_all_reduce({DType::kFloat32, {size()}}, ReduceOp::kSum, input(each), output(each)));
      engine.submit(pending.back(), /*in_background=*/true);
    }
    complete(engine, make_barrier());
    for (size_t i = pending.size(); i-- > 0;) {
      engine.wait(*pending[i], milliseconds(0));
      EXPECT_FALSE(pending[i]->error());
      EXPECT_EQ(values[i], sum_over(num_ranks(), size()));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks,
                         Exchange,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 5),
                                            ::testing::Values(0, 1, 7, 4096, 50001)));

TEST(ExchangeTest, WhatNobodyWaitsForIsDoneInTheBackground) {
  run_threads(2, [](Engine& engine, int rank) {
    Values values = values_of(rank, 100000);
    const auto pending =
        make_all_reduce({DType::kFloat32, {100000}}, ReduceOp::kSum, input(values), output(values));
    if (rank == 1) std::this_thread::sleep_for(milliseconds(50));
    engine.submit(pending, /*in_background=*/true);
    const auto limit = std::chrono::steady_clock::now() + milliseconds(10000);
    while (!pending->is_done() && std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_TRUE(pending->is_done());
    EXPECT_EQ(values, sum_over(2, 100000));
    complete(engine, make_barrier());
  });
}

TEST(ExchangeTest, WhatIsCalledAtTheEndMayWaitForMore) {
  run_threads(2, [](Engine& engine, int rank) {
    Values first = values_of(rank, 10);
    Values second = values_of(rank, 10);
    const auto outer =
        make_all_reduce({DType::kFloat32, {10}}, ReduceOp::kSum, input(first), output(first));
    outer->on_done = [&](const std::exception_ptr& error) {
      EXPECT_FALSE(error);
      complete(
          engine,
          make_all_reduce({DType::kFloat32, {10}}, ReduceOp::kSum, input(second), output(second)));
    };
    complete(engine, outer);
    EXPECT_EQ(second, sum_over(2, 10));
  });
}

}  // namespace
}  // namespace weft::collectives::testing
