// Compares every collective with its expected result, on 1 to 5 ranks on 1 to 3 hosts, for empty
// tensors up to tensors of many chunks.
#include "ranks.h"
#include "values.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <tuple>

namespace weft::collectives::testing {
namespace {

class CollectivesMatchReferences
    : public ::testing::TestWithParam<std::tuple<std::string, int64_t>> {
 protected:
  std::string hosts() const { return std::get<0>(GetParam()); }
  int num_ranks() const { return static_cast<int>(hosts().size()); }
  int64_t size() const { return std::get<1>(GetParam()); }
  int root() const { return num_ranks() / 2; }

  // Small staging buffers, so that larger tensors need many chunks.
  static constexpr size_t kStagingLimit = size_t{128} * 1024;
  template <typename Body>
  void run(const Body& body) {
    GroupOptions options = group_of(1, 0);
    options.staging_limit_bytes = kStagingLimit;
    run_on_hosts(hosts(), body, options);
  }
};

TEST_P(CollectivesMatchReferences, AllReduce) {
  run([&](Group& group, int rank) {
    Values values = values_of(rank, size());
    for (int repeat = 0; repeat < 3; ++repeat) {
      Values result(values.size());
      complete(group,
               all_reduce_call(
                   {DType::kFloat32, {size()}}, ReduceOp::kSum, input(values), output(result)));
      EXPECT_EQ(result, sum_over(num_ranks(), size()));
    }
    complete(group,
             all_reduce_call(
                 {DType::kFloat32, {size()}}, ReduceOp::kSum, input(values), output(values)));
    EXPECT_EQ(values, sum_over(num_ranks(), size())) << "in place";
  });
}

TEST_P(CollectivesMatchReferences, Reduce) {
  run([&](Group& group, int rank) {
    Values values = values_of(rank, size());
    complete(group,
             reduce_call({DType::kFloat32, {size()}},
                         ReduceOp::kSum,
                         input(values),
                         output(values),
                         root(),
                         rank));
    EXPECT_EQ(values, rank == root() ? sum_over(num_ranks(), size()) : values_of(rank, size()));
  });
}

TEST_P(CollectivesMatchReferences, ReduceScatterOfUnevenSegments) {
  run([&](Group& group, int rank) {
    std::vector<Values> segments;
    std::vector<Input> inputs;
    for (int peer = 0; peer < num_ranks(); ++peer) {
      segments.push_back(values_of(rank, size() + peer));
    }
    for (Values& segment : segments) inputs.push_back(input(segment));
    Values result(static_cast<size_t>(size() + rank));
    complete(group,
             reduce_scatter_call(DType::kFloat32, ReduceOp::kSum, inputs, output(result), rank));
    EXPECT_EQ(result, sum_over(num_ranks(), size() + rank));
  });
}

// The largest segment is that of rank 0, then that of rank 1; those of other even ranks are empty.
// Round 1 has equal segments, so that the slot size changes.
TEST_P(CollectivesMatchReferences, ReduceScatterOfSegmentsThatChangeFromCallToCall) {
  const auto segment_size = [&](int peer, int round) -> int64_t {
    if (round == 1) return size();
    return peer == round / 2 ? 3 * size() + 1 : (peer % 2) * (peer + 7);
  };
  run([&](Group& group, int rank) {
    for (int round = 0; round < 4; ++round) {
      std::vector<Values> segments;
      std::vector<Input> inputs;
      for (int peer = 0; peer < num_ranks(); ++peer) {
        segments.push_back(values_of(rank, segment_size(peer, round)));
      }
      for (Values& segment : segments) inputs.push_back(input(segment));
      Values result(static_cast<size_t>(segment_size(rank, round)));
      complete(group,
               reduce_scatter_call(DType::kFloat32, ReduceOp::kSum, inputs, output(result), rank));
      EXPECT_EQ(result, sum_over(num_ranks(), segment_size(rank, round))) << "round " << round;
    }
  });
}

TEST_P(CollectivesMatchReferences, AllGatherOfUnevenInputs) {
  run([&](Group& group, int rank) {
    Values values = values_of(rank, size() + rank);
    std::vector<Values> results;
    std::vector<Output> outputs;
    for (int peer = 0; peer < num_ranks(); ++peer) {
      results.emplace_back(static_cast<size_t>(size() + peer));
    }
    for (Values& result : results) outputs.push_back(output(result));
    complete(group, all_gather_call(DType::kFloat32, input(values), outputs));
    for (int peer = 0; peer < num_ranks(); ++peer) {
      EXPECT_EQ(results[static_cast<size_t>(peer)], values_of(peer, size() + peer));
    }
  });
}

TEST_P(CollectivesMatchReferences, Broadcast) {
  run([&](Group& group, int rank) {
    Values values = values_of(rank, size());
    complete(group, broadcast_call({DType::kFloat32, {size()}}, output(values), root(), rank));
    EXPECT_EQ(values, values_of(root(), size()));
  });
}

TEST_P(CollectivesMatchReferences, GatherAndScatter) {
  run([&](Group& group, int rank) {
    Values values = values_of(rank, size());
    std::vector<Values> all;
    std::vector<Output> outputs;
    std::vector<Input> inputs;
    if (rank == root()) {
      all.assign(static_cast<size_t>(num_ranks()), Values(values.size()));
      for (Values& each : all) outputs.push_back(output(each));
    }
    complete(group,
             gather_call(DType::kFloat32, input(values), outputs, root(), rank, num_ranks()));
    for (size_t peer = 0; peer < all.size(); ++peer) {
      EXPECT_EQ(all[peer], values_of(static_cast<int>(peer), size()));
      inputs.push_back(input(all[peer]));
    }
    Values back(values.size());
    complete(group, scatter_call(DType::kFloat32, inputs, output(back), root(), rank, num_ranks()));
    EXPECT_EQ(back, values);
  });
}

TEST_P(CollectivesMatchReferences, AllToAllWithSplits) {
  run([&](Group& group, int rank) {
    std::vector<Values> sent;
    std::vector<Values> received;
    std::vector<Input> inputs;
    std::vector<Output> outputs;
    for (int peer = 0; peer < num_ranks(); ++peer) {
      sent.push_back(values_of(10 * rank + peer, size() + 2 * rank + peer));
      received.emplace_back(static_cast<size_t>(size() + 2 * peer + rank));
    }
    for (Values& each : sent) inputs.push_back(input(each));
    for (Values& each : received) outputs.push_back(output(each));
    complete(group, all_to_all_call(DType::kFloat32, inputs, outputs));
    for (int peer = 0; peer < num_ranks(); ++peer) {
      EXPECT_EQ(received[static_cast<size_t>(peer)],
                values_of(10 * peer + rank, size() + 2 * peer + rank));
    }
  });
}

// No rank knows the number of entries of the others; that of rank 1 is 0.
TEST_P(CollectivesMatchReferences, SparseAllReduceGathersEntriesOfAllRanks) {
  const auto num_entries = [&](int rank) -> int64_t { return rank == 1 ? 0 : size() + rank; };
  const auto num_bytes = [](const Values& values) {
    return static_cast<int64_t>(values.size() * sizeof(float));
  };
  run([&](Group& group, int rank) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      Values values = values_of(rank, num_entries(rank));
      std::vector<Values> results;
      complete(group,
               sparse_all_reduce_call({DType::kFloat32, {1000, 3}},
                                      1,
                                      num_entries(rank),
                                      {bytes(values), num_bytes(values)},
                                      [&](const std::vector<int64_t>& counts) {
                                        for (const int64_t count : counts) {
                                          results.emplace_back(static_cast<size_t>(count));
                                        }
                                        std::vector<Output> outputs;
                                        for (Values& each : results) {
                                          outputs.push_back({bytes(each), num_bytes(each)});
                                        }
                                        return outputs;
                                      }));
      ASSERT_EQ(results.size(), static_cast<size_t>(num_ranks()));
      for (int peer = 0; peer < num_ranks(); ++peer) {
        EXPECT_EQ(results[static_cast<size_t>(peer)], values_of(peer, num_entries(peer)));
      }
    }
  });
}

TEST_P(CollectivesMatchReferences, CollectivesInFlightKeepTheirOrder) {
  run([&](Group& group, int rank) {
    std::vector<Values> values(20, values_of(rank, size()));
    std::vector<OperationPtr> pending;
    for (Values& each : values) {
      pending.push_back(group.make(
          all_reduce_call({DType::kFloat32, {size()}}, ReduceOp::kSum, input(each), output(each))));
      group.submit(pending.back(), /*in_background=*/true);
    }
    complete(group, barrier_call());
    for (size_t i = pending.size(); i-- > 0;) {
      group.wait(*pending[i], milliseconds(0));
      EXPECT_FALSE(pending[i]->error());
      EXPECT_EQ(values[i], sum_over(num_ranks(), size()));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ranks,
    CollectivesMatchReferences,
    ::testing::Combine(
        ::testing::Values("a", "aa", "aaa", "aaaa", "aaaaa", "ab", "abc", "aab", "abab", "abbca"),
        ::testing::Values(0, 1, 7, 4096, 50001)));

// The input is built in staging memory acquired from the group; 50001 floats do not fit there.
TEST_P(CollectivesMatchReferences, AllReduceFromScratch) {
  run([&](Group& group, int rank) {
    int num_acquired = 0;
    for (int repeat = 0; repeat < 5; ++repeat) {
      const Values values = values_of(rank, size());
      Values result(values.size());
      std::byte* const scratch = group.acquire_scratch(values.size() * sizeof(float));
      num_acquired += scratch != nullptr ? 1 : 0;
      if (scratch == nullptr) {
        result = values;
        complete(group,
                 all_reduce_call(
                     {DType::kFloat32, {size()}}, ReduceOp::kSum, input(result), output(result)));
      } else {
        EXPECT_EQ(group.acquire_scratch(1), nullptr) << "the scratch memory was acquired twice";
        if (repeat == 3) {
          group.release_scratch();
          continue;
        }
        std::ranges::copy(values, reinterpret_cast<float*>(scratch));
        const auto operation = group.make(all_reduce_call(
            {DType::kFloat32, {size()}}, ReduceOp::kSum, {scratch, size()}, output(result)));
        group.submit_scratch(operation);
        group.wait(*operation, milliseconds(0));
      }
      EXPECT_EQ(result, sum_over(num_ranks(), size()));
    }
    const bool is_one_host = hosts().find_first_not_of('a') == std::string::npos;
    const size_t staging_bytes = SharedSizes::within(num_ranks(), kStagingLimit).staging_bytes;
    const bool is_acquirable =
        is_one_host && static_cast<size_t>(size()) * sizeof(float) <= staging_bytes;
    EXPECT_EQ(num_acquired, is_acquirable ? 5 : 0);
    complete(group, barrier_call());
  });
}

// The results are large enough for streaming stores; sources and targets are not aligned to cache
// lines.
TEST(StreamingStores, GiveExactResults) {
  constexpr size_t kSize = 700001;
  run_threads(3, [](Engine& engine, int rank) {
    const auto tail = [](Values& values) { return values.data() + 1; };
    const auto as_bytes = [](float* data) { return reinterpret_cast<std::byte*>(data); };
    constexpr auto kElements = static_cast<int64_t>(kSize - 1);
    const auto element = [](int source, size_t i) {
      return static_cast<float>((static_cast<size_t>(source) + 1) * (i % 97));
    };
    Values full(3 * kSize);
    std::vector<Input> inputs;
    for (size_t segment = 0; segment < 3; ++segment) {
      float* const data = full.data() + segment * kSize + 1;
      for (size_t i = 0; i < kSize - 1; ++i) data[i] = element(rank, i + segment);
      inputs.push_back({as_bytes(data), kElements});
    }
    Values result(kSize);
    complete(
        engine,
        reduce_scatter_call(
            DType::kFloat32, ReduceOp::kSum, inputs, {as_bytes(tail(result)), kElements}, rank));
    for (size_t i = 0; i < kSize - 1; ++i) {
      ASSERT_EQ(tail(result)[i], 6 * element(0, i + static_cast<size_t>(rank))) << i;
    }
    std::vector<Values> gathered(3, Values(kSize));
    std::vector<Output> outputs;
    for (Values& each : gathered) outputs.push_back({as_bytes(tail(each)), kElements});
    complete(engine, all_gather_call(DType::kFloat32, inputs.front(), outputs));
    for (int peer = 0; peer < 3; ++peer) {
      const float* const got = tail(gathered[static_cast<size_t>(peer)]);
      for (size_t i = 0; i < kSize - 1; ++i) ASSERT_EQ(got[i], element(peer, i)) << i;
    }
    complete(engine, all_to_all_call(DType::kFloat32, inputs, outputs));
    for (int peer = 0; peer < 3; ++peer) {
      const float* const got = tail(gathered[static_cast<size_t>(peer)]);
      for (size_t i = 0; i < kSize - 1; ++i) {
        ASSERT_EQ(got[i], element(peer, i + static_cast<size_t>(rank))) << i;
      }
    }
  });
}

class OperationTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Hosts, OperationTest, ::testing::Values("aa", "ab"));

TEST_P(OperationTest, CompletesInTheBackgroundWithoutAWait) {
  run_on_hosts(GetParam(), [](Group& group, int rank) {
    Values values = values_of(rank, 100000);
    const auto pending = group.make(all_reduce_call(
        {DType::kFloat32, {100000}}, ReduceOp::kSum, input(values), output(values)));
    if (rank == 1) std::this_thread::sleep_for(milliseconds(50));
    group.submit(pending, /*in_background=*/true);
    const auto limit = std::chrono::steady_clock::now() + milliseconds(10000);
    while (!pending->is_done() && std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_TRUE(pending->is_done());
    EXPECT_EQ(values, sum_over(2, 100000));
    complete(group, barrier_call());
  });
}

TEST_P(OperationTest, OnDoneMayRunAnotherCollective) {
  run_on_hosts(GetParam(), [](Group& group, int rank) {
    Values first = values_of(rank, 10);
    Values second = values_of(rank, 10);
    const auto outer = group.make(
        all_reduce_call({DType::kFloat32, {10}}, ReduceOp::kSum, input(first), output(first)));
    outer->on_done = [&](const std::exception_ptr& error) {
      EXPECT_FALSE(error);
      complete(
          group,
          all_reduce_call({DType::kFloat32, {10}}, ReduceOp::kSum, input(second), output(second)));
    };
    complete(group, outer);
    EXPECT_EQ(second, sum_over(2, 10));
  });
}

TEST(Scratch, OtherCollectivesWaitUntilItIsSubmittedOrReleased) {
  run_threads(2, [](Engine& engine, int rank) {
    for (const bool releases : {false, true}) {
      Values first = values_of(rank, 5000);
      Values second = values_of(rank + 1, 5000);
      Values result(5000);
      std::byte* const scratch = engine.acquire_scratch(5000 * sizeof(float));
      ASSERT_NE(scratch, nullptr);
      // Another thread of this rank submits a collective in the meantime and waits for it.
      std::thread other([&] {
        complete(engine,
                 all_reduce_call(
                     {DType::kFloat32, {5000}}, ReduceOp::kSum, input(second), output(second)));
      });
      std::this_thread::sleep_for(milliseconds(20));
      std::memcpy(scratch, first.data(), 5000 * sizeof(float));
      if (releases) {
        engine.release_scratch();
      } else {
        const auto operation = engine.make(all_reduce_call(
            {DType::kFloat32, {5000}}, ReduceOp::kSum, {scratch, 5000}, output(result)));
        engine.submit_scratch(operation);
        engine.wait(*operation, milliseconds(0));
        EXPECT_FALSE(operation->error());
        EXPECT_EQ(result, sum_over(2, 5000));
      }
      other.join();
      Values expected = values_of(1, 5000);
      const Values added = values_of(2, 5000);
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += added[i];
      EXPECT_EQ(second, expected);
    }
    complete(engine, barrier_call());
  });
}

}  // namespace
}  // namespace weft::collectives::testing
