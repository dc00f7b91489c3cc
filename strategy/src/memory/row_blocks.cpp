#include "weft/strategy/row_blocks.h"

#include <algorithm>

namespace weft::strategy {

namespace {

constexpr int64_t kMinBytes = int64_t{1} << 20;
constexpr int64_t kMaxCudaBytes = int64_t{64} << 20;
constexpr int64_t kMinCudaBlocks = 4;
constexpr int64_t kTileRows = 128;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t rows_on_cuda(int64_t num_rows, int64_t row_bytes) {
  const int64_t num_blocks =
      std::max(kMinCudaBlocks, divide_up(num_rows * row_bytes, kMaxCudaBytes));
  return divide_up(divide_up(num_rows, num_blocks), kTileRows) * kTileRows;
}

}  // namespace

int64_t rows_per_block(DeviceKind device, int64_t num_rows, int64_t row_bytes) {
  int64_t rows = kMinBytes / std::max<int64_t>(1, row_bytes);
  if (device == DeviceKind::kCuda) {
    rows = std::max(rows, rows_on_cuda(num_rows, row_bytes));
  }
  return std::clamp<int64_t>(rows, 1, std::max<int64_t>(1, num_rows));
}

}  // namespace weft::strategy
