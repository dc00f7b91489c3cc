// The ranks' staging buffers: who may fill what, and how large they are.
#include "parts.h"
#include "ranks.h"
#include "values.h"

#include <algorithm>
#include <random>
#include <thread>

namespace weft::collectives::testing {
namespace {

class StagingTest : public ::testing::TestWithParam<size_t> {};

// With the larger, what two halves hold is combined as one chunk.
INSTANTIATE_TEST_SUITE_P(Limits, StagingTest, ::testing::Values(128 * 1024, 1024 * 1024));

// Collectives of every number of chunks one after another, of which some ranks are late at some:
// no rank may overwrite the buffers of one before all ranks have read them.
TEST_P(StagingTest, IsFilledAgainWhenAllHaveReadIt) {
  constexpr int kRanks = 3;
  GroupOptions options = group_of(1, 0);
  options.staging_limit_bytes = GetParam();
  const size_t buffer = SharedSizes::within(kRanks, GetParam()).staging_bytes;
  const auto half = static_cast<int64_t>(buffer / 2 / sizeof(float));
  std::vector<int64_t> sizes = {1, half - 1, half, half + 1, 2 * half, 9 * half};
  for (int64_t chunks = 3; chunks < 8; ++chunks) sizes.push_back((chunks - 1) * half + 1);
  run_on_hosts(
      "aaa",
      [&](Group& group, int rank) {
        std::mt19937 same(7);          // on all ranks
        std::mt19937 own(100 + rank);  // of this one
        for (int repeat = 0; repeat < 300; ++repeat) {
          const int64_t size = sizes[same() % sizes.size()];
          const TensorFacts facts{DType::kFloat32, {size}};
          Values values = values_of(rank, size);
          if (own() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 500));
          switch (same() % 5) {
            case 0:
              complete(group,
                       all_reduce_call(facts, ReduceOp::kSum, input(values), output(values)));
              ASSERT_EQ(values, sum_over(kRanks, size)) << repeat;
              break;
            case 1: {
              std::vector<Values> gathered(kRanks, Values(values.size()));
              std::vector<Output> outputs;
              for (Values& each : gathered) outputs.push_back(output(each));
              complete(group, all_gather_call(DType::kFloat32, input(values), outputs));
              for (int r = 0; r < kRanks; ++r) {
                ASSERT_EQ(gathered[static_cast<size_t>(r)], values_of(r, size)) << repeat;
              }
              break;
            }
            case 2: {
              std::byte* const lent = group.lend_scratch(values.size() * sizeof(float));
              ASSERT_EQ(lent != nullptr, values.size() * sizeof(float) <= buffer) << repeat;
              if (lent == nullptr) break;
              std::ranges::copy(values, reinterpret_cast<float*>(lent));
              const auto sum =
                  group.make(all_reduce_call(facts, ReduceOp::kSum, {lent, size}, output(values)));
              group.submit_lent(sum);
              group.wait(*sum, milliseconds(0));
              ASSERT_EQ(values, sum_over(kRanks, size)) << repeat;
              break;
            }
            case 3: {
              const int root = static_cast<int>(same() % kRanks);
              complete(group, broadcast_call(facts, output(values), root, rank));
              ASSERT_EQ(values, values_of(root, size)) << repeat;
              break;
            }
            default: {
              std::vector<Input> parts(kRanks, input(values));
              Values result(values.size());
              complete(group,
                       reduce_scatter_call(
                           DType::kFloat32, ReduceOp::kSum, parts, output(result), rank));
              ASSERT_EQ(result, sum_over(kRanks, size)) << repeat;
            }
          }
        }
      },
      options);
}

// Large reduce-scatters of many ranks take both buffers in turn; others come before and after.
TEST(Staging, OfLargeReduceScattersIsFilledAgainWhenAllHaveReadIt) {
  constexpr int kRanks = 5;
  GroupOptions options = group_of(1, 0);
  options.staging_limit_bytes = 1 << 20;
  run_on_hosts(
      "aaaaa",
      [&](Group& group, int rank) {
        std::mt19937 same(7);
        std::mt19937 own(100 + rank);
        for (int repeat = 0; repeat < 12; ++repeat) {
          const int64_t size =
              (int64_t{2} << 20) / kRanks + 1000 + static_cast<int64_t>(same() % 40000);
          Values values = values_of(rank, size);
          std::vector<Input> parts(kRanks, input(values));
          Values result(values.size());
          if (own() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 900));
          complete(
              group,
              reduce_scatter_call(DType::kFloat32, ReduceOp::kSum, parts, output(result), rank));
          ASSERT_EQ(result, sum_over(kRanks, size)) << repeat;
          Values small = values_of(rank, 1 + static_cast<int64_t>(same() % 60000));
          const auto small_size = static_cast<int64_t>(small.size());
          complete(
              group,
              all_reduce_call(
                  {DType::kFloat32, {small_size}}, ReduceOp::kSum, input(small), output(small)));
          ASSERT_EQ(small, sum_over(kRanks, small_size)) << repeat;
        }
      },
      options);
}

TEST(Staging, HasRoomForEveryRank) {
  for (const int num_ranks : {1, 2, 8, 128, 256, 1024}) {
    const size_t half = SharedSizes::within(num_ranks, size_t{16} << 20).staging_bytes / 2;
    EXPECT_GE(slot_bytes(half, num_ranks), 64) << num_ranks;
  }
}

}  // namespace
}  // namespace weft::collectives::testing
