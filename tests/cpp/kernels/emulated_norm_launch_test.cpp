// The blocks and the kernels that the norms' launches choose for rows of each length, and a launch
// of many blocks. Results do not show the choice: a row that threads keep in registers gives the
// same results as a row that they read again, and the emulator ignores a kernel's launch bounds.
#include "cuda_emulator.h"
#include "norm_launch.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace weft::kernels::testing::norm_launch {
namespace {

struct Row {
  int64_t size;
  bool aligned;
  unsigned num_threads;
  std::string kernel;  // rows of one name, and no others, use the same kernel
};

class NormLaunches : public ::testing::Test {
 protected:
  static constexpr int64_t kMaxSize = 5000;

  void TearDown() override { cuda_emulator::settings() = saved_; }

  // An array that begins at a multiple of 16 bytes, or 8 bytes after one.
  double* array(const Row& row) {
    arrays_.emplace_back(kMaxSize + 2);
    double* const begin = arrays_.back().data();
    const bool is_aligned = reinterpret_cast<uintptr_t>(begin) % 16 == 0;
    return begin + (is_aligned == row.aligned ? 0 : 1);
  }

  // Runs `launch` for each row, and compares the block and the kernel with those of `Row`.
  template <typename Launch>
  void expect_launches(const std::vector<Row>& rows, const Launch& launch) {
    std::map<std::string, std::set<const void*>> kernels;
    std::set<const void*> all_kernels;
    for (const Row& row : rows) {
      std::vector<cuda_emulator::Launch> launches;
      cuda_emulator::settings().launches = &launches;
      launch(row);
      ASSERT_EQ(launches.size(), 1U);
      EXPECT_EQ(launches[0].block_size.x, row.num_threads) << row.size << " elements";
      kernels[row.kernel].insert(launches[0].kernel);
      all_kernels.insert(launches[0].kernel);
    }
    for (const auto& [name, used] : kernels) EXPECT_EQ(used.size(), 1U) << name;
    EXPECT_EQ(all_kernels.size(), kernels.size());
  }

  const cuda_emulator::Settings saved_ = cuda_emulator::settings();
  const c10::Device device_{c10::DeviceType::CPU};
  std::vector<std::vector<double>> arrays_;
};

// A pack has two elements of float64.
TEST_F(NormLaunches, ForwardChoosesBlockAndKernelByRow) {
  const std::vector<Row> rows = {{2, true, 32, "keeps 4 packs"},
                                 {256, true, 32, "keeps 4 packs"},
                                 {258, true, 64, "keeps 4 packs"},
                                 {2050, true, 288, "keeps 4 packs"},
                                 {4096, true, 512, "keeps 4 packs"},
                                 {4098, true, 512, "reads packs"},
                                 {33, true, 64, "reads elements"},
                                 {128, false, 128, "reads elements"},
                                 {2047, true, 512, "reads elements"},
                                 {2048, false, 512, "reads elements"}};
  expect_launches(rows, [&](const Row& row) {
    double statistics[2];
    cuda::launch_norm_forward({.type = detail::StorageType::kFloat64,
                               .centered = true,
                               .params_in_compute_type = true,
                               .eps = 1e-5,
                               .num_rows = 1,
                               .row_size = row.size,
                               .x = array(row),
                               .y = array(row),
                               .mean = &statistics[0],
                               .rstd = &statistics[1]},
                              device_);
  });
}

TEST_F(NormLaunches, BackwardChoosesBlockAndKernelByRow) {
  const std::vector<Row> rows = {{2, true, 32, "keeps 2 packs"},
                                 {130, true, 64, "keeps 2 packs"},
                                 {1024, true, 256, "keeps 2 packs"},
                                 {1026, true, 288, "keeps 2 packs"},
                                 {2048, true, 512, "keeps 2 packs"},
                                 {2050, true, 512, "reads packs"},
                                 {4098, true, 512, "reads packs"},
                                 {33, true, 64, "reads elements"},
                                 {128, false, 128, "reads elements"},
                                 {1025, true, 512, "reads elements"},
                                 {1024, false, 512, "reads elements"}};
  expect_launches(rows, [&](const Row& row) {
    const double rstd = 1;
    cuda::launch_norm_backward({.type = detail::StorageType::kFloat64,
                                .centered = false,
                                .params_in_compute_type = true,
                                .has_bias = false,
                                .num_rows = 1,
                                .row_size = row.size,
                                .grad_y = array(row),
                                .v = array(row),
                                .rstd = &rstd,
                                .grad_v = array(row)},
                               0,
                               nullptr,
                               nullptr,
                               device_);
  });
}

// Each thread of the kernel that sums over blocks adds the partial sums of several blocks.
TEST_F(NormLaunches, BackwardSumsOverManyBlocks) {
  constexpr int64_t kRows = 100;
  constexpr int64_t kSize = 3;
  cuda_emulator::settings().device.num_multiprocessors = 20;
  std::vector<double> grad_y(kRows * kSize), v(kRows * kSize), expected(2 * kSize);
  const std::vector<double> rstd(kRows, 1.0);
  for (int64_t i = 0; i < kRows * kSize; ++i) {
    grad_y[i] = static_cast<double>(i % 7);
    v[i] = static_cast<double>(i % 11);
    expected[i % kSize] += grad_y[i] * v[i];
    expected[kSize + (i % kSize)] += grad_y[i];
  }
  const detail::NormBackwardJob job{.type = detail::StorageType::kFloat64,
                                    .centered = false,
                                    .params_in_compute_type = true,
                                    .has_bias = true,
                                    .num_rows = kRows,
                                    .row_size = kSize,
                                    .grad_y = grad_y.data(),
                                    .v = v.data(),
                                    .rstd = rstd.data()};
  const int64_t num_blocks = cuda::norm_backward_blocks(job, device_);
  ASSERT_GT(num_blocks, 64);
  std::vector<double> partial_sums(num_blocks * 2 * kSize), sums(2 * kSize);
  cuda::launch_norm_backward(job, 2, partial_sums.data(), sums.data(), device_);
  EXPECT_EQ(sums, expected);  // float64 adds integers exactly
}

}  // namespace
}  // namespace weft::kernels::testing::norm_launch
