// The sizes of the blocks of rows that are stepped inside the backward.
#include <weft/strategy/row_blocks.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

namespace weft::strategy {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(RowBlocks, HaveOneMebibyteOnTheCpu) {
  EXPECT_EQ(rows_per_block(DeviceKind::kCpu, 8192, 4096 * 4), 64);
  EXPECT_EQ(rows_per_block(DeviceKind::kCpu, 11008, 4096 * 2), 128);
  EXPECT_EQ(rows_per_block(DeviceKind::kCpu, 5, 8), 5);
  EXPECT_EQ(rows_per_block(DeviceKind::kCpu, 5, 2 * kMiB), 1);
}

TEST(RowBlocks, HaveAtLeastOneRow) {
  for (const auto device : {DeviceKind::kCpu, DeviceKind::kCuda}) {
    EXPECT_EQ(rows_per_block(device, 0, 4096), 1);
    EXPECT_EQ(rows_per_block(device, 3, 0), 3);
  }
}

TEST(RowBlocks, AreAQuarterOfAWeightOnCuda) {
  // A weight of a model of 7 billion parameters: 22 tiles of 128 rows.
  EXPECT_EQ(rows_per_block(DeviceKind::kCuda, 11008, 4096 * 2), 22 * 128);
  EXPECT_EQ(rows_per_block(DeviceKind::kCuda, 4096, 11008 * 2), 1024);
}

TEST(RowBlocks, HaveAtMost64MebibytesOnCuda) {
  EXPECT_EQ(rows_per_block(DeviceKind::kCuda, 28672, 8192 * 4), 2048);
}

TEST(RowBlocks, HaveAtLeastOneMebibyteOnCuda) {
  EXPECT_EQ(rows_per_block(DeviceKind::kCuda, 1024, 512 * 4), 512);
  EXPECT_EQ(rows_per_block(DeviceKind::kCuda, 64, 64 * 4), 64);
}

TEST(RowBlocks, AreWithinTheLimitsForAllShapes) {
  for (int64_t num_rows = 1; num_rows < 100'000; num_rows = num_rows * 3 / 2 + 1) {
    for (int64_t row_bytes = 2; row_bytes < 200'000; row_bytes = row_bytes * 2 + 2) {
      const int64_t rows = rows_per_block(DeviceKind::kCuda, num_rows, row_bytes);
      EXPECT_GE(rows, rows_per_block(DeviceKind::kCpu, num_rows, row_bytes));
      EXPECT_LE(rows, num_rows);
      EXPECT_LE(rows * row_bytes, 64 * kMiB + 128 * row_bytes);
      const int64_t most = std::max((num_rows + 3) / 4 + 127, kMiB / row_bytes);
      EXPECT_LE(rows, most) << num_rows << " rows of " << row_bytes << " bytes";
    }
  }
}

}  // namespace
}  // namespace weft::strategy
