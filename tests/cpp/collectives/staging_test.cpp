// The ranks' staging buffers: when they may be overwritten, and their sizes.
#include "ranges.h"
#include "ranks.h"
#include "values.h"

#include <algorithm>
#include <random>
#include <thread>

namespace weft::collectives::testing {
namespace {

class StagingTest : public ::testing::TestWithParam<size_t> {};

// With the larger limit, an all-reduce that fills both halves of a buffer is combined as one chunk.
INSTANTIATE_TEST_SUITE_P(Limits, StagingTest, ::testing::Values(128 * 1024, 1024 * 1024));

// Consecutive collectives with various numbers of chunks and random delays on each rank: no rank
// may overwrite a buffer before all ranks have read it.
TEST_P(StagingTest, ABufferIsRefilledOnlyAfterAllRanksReadIt) {
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
        std::mt19937 same(7);          // the same on all ranks
        std::mt19937 own(100 + rank);  // differs between ranks
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
              std::byte* const scratch = group.acquire_scratch(values.size() * sizeof(float));
              ASSERT_EQ(scratch != nullptr, values.size() * sizeof(float) <= buffer) << repeat;
              if (scratch == nullptr) break;
              std::ranges::copy(values, reinterpret_cast<float*>(scratch));
              const auto sum = group.make(
                  all_reduce_call(facts, ReduceOp::kSum, {scratch, size}, output(values)));
              group.submit_scratch(sum);
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
              std::vector<Input> inputs(kRanks, input(values));
              Values result(values.size());
              complete(group,
                       reduce_scatter_call(
                           DType::kFloat32, ReduceOp::kSum, inputs, output(result), rank));
              ASSERT_EQ(result, sum_over(kRanks, size)) << repeat;
            }
          }
        }
      },
      options);
}

// Large reduce-scatters of many ranks alternate between both buffers; other collectives run before
// and after them.
TEST(Staging, LargeReduceScattersRefillABufferOnlyAfterAllRanksReadIt) {
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
          std::vector<Input> inputs(kRanks, input(values));
          Values result(values.size());
          if (own() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 900));
          complete(
              group,
              reduce_scatter_call(DType::kFloat32, ReduceOp::kSum, inputs, output(result), rank));
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

TEST(Staging, HalfABufferHasASlotForEveryRank) {
  for (const int num_ranks : {1, 2, 8, 128, 256, 1024}) {
    const size_t half = SharedSizes::within(num_ranks, size_t{16} << 20).staging_bytes / 2;
    EXPECT_GE(slot_bytes(half, num_ranks), 64) << num_ranks;
  }
}

}  // namespace
}  // namespace weft::collectives::testing
