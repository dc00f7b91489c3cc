// Arrays of more than 2^31 elements, on the emulator: their memory is reserved, not committed, and
// only the first and the last block of each grid run. The last elements must equal the results
// of the same kernel for an array of only these elements.
#include "activation_launch.h"
#include "cross_entropy_launch.h"
#include "cuda_emulator.h"
#include "dropout_launch.h"
#include "norm_launch.h"
#include "optimizer_step_launch.h"

#include <c10/util/BFloat16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <sys/mman.h>
#include <vector>

namespace weft::kernels::testing::index {
namespace {

using c10::BFloat16;

constexpr int64_t kTwoTo31 = int64_t{1} << 31;
const c10::Device kDevice(c10::DeviceType::CPU);

// An array of zeros; its untouched pages are not backed by memory.
template <typename Element>
class SparseArray {
 public:
  explicit SparseArray(int64_t size) : bytes_(static_cast<std::size_t>(size) * sizeof(Element)) {
    void* memory = ::mmap(nullptr,
                          bytes_,
                          PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                          -1,
                          0);
    if (memory == MAP_FAILED) throw std::runtime_error("mmap failed");
    data_ = static_cast<Element*>(memory);
  }
  ~SparseArray() { ::munmap(data_, bytes_); }
  SparseArray(const SparseArray&) = delete;
  SparseArray& operator=(const SparseArray&) = delete;
  SparseArray(SparseArray&&) = delete;
  SparseArray& operator=(SparseArray&&) = delete;

  Element* at(int64_t idx) { return data_ + idx; }

  // Fills [begin, begin + size) with values that differ.
  void fill(int64_t begin, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      const auto angle = static_cast<float>(7 * i + 1);
      data_[begin + i] = std::sin(angle) + 0.01F * static_cast<float>(i % 13);
    }
  }

 private:
  std::size_t bytes_;
  Element* data_;
};

template <typename Element>
std::vector<double> values_of(SparseArray<Element>& array, int64_t begin, int64_t size) {
  return {array.at(begin), array.at(begin) + size};
}

class LargeArrays : public ::testing::Test {
 protected:
  void SetUp() override {
    // The grids are not limited: each row has a block, or each pack a thread.
    cuda_emulator::settings().device.num_multiprocessors = 1 << 20;
    cuda_emulator::settings().only_outer_blocks = true;
  }
  void TearDown() override { cuda_emulator::settings() = saved_; }

  const cuda_emulator::Settings saved_ = cuda_emulator::settings();
};

TEST_F(LargeArrays, ActivationIsExactBeyond2To31Elements) {
  // The last block has 80 elements; the first block processes the remainder of 5.
  const int64_t size = kTwoTo31 + 3 * 2048 + 85;
  const int64_t begin = size - 85;
  SparseArray<BFloat16> x(size), up(size), grad_h(size), h(size), grad_x(size), grad_up(size);
  for (auto* each : {&x, &up, &grad_h}) each->fill(begin, 85);
  detail::ActivationJob job{.op = detail::ActivationOp::kGatedBackward,
                            .activation = Activation::kGelu,
                            .type = detail::StorageType::kBFloat16,
                            .num_elements = size,
                            .grad_h = grad_h.at(0),
                            .x = x.at(0),
                            .up = up.at(0),
                            .h = h.at(0),
                            .grad_x = grad_x.at(0),
                            .grad_up = grad_up.at(0)};
  cuda::launch_activation(job, kDevice);

  SparseArray<BFloat16> last_h(85), last_grad_x(85), last_grad_up(85);
  job.num_elements = 85;
  job.grad_h = grad_h.at(begin);
  job.x = x.at(begin);
  job.up = up.at(begin);
  job.h = last_h.at(0);
  job.grad_x = last_grad_x.at(0);
  job.grad_up = last_grad_up.at(0);
  cuda::launch_activation(job, kDevice);
  EXPECT_EQ(values_of(h, begin, 85), values_of(last_h, 0, 85));
  EXPECT_EQ(values_of(grad_x, begin, 85), values_of(last_grad_x, 0, 85));
  EXPECT_EQ(values_of(grad_up, begin, 85), values_of(last_grad_up, 0, 85));
  EXPECT_NE(values_of(h, begin, 85), std::vector<double>(85, 0.0));
}

// More than 2^32 elements of h in two rows, whose positions need a division of 64-bit integers.
TEST_F(LargeArrays, GateUpActivation) {
  const int64_t row_size = kTwoTo31 + 2048 + 48;
  const int64_t size = 2 * row_size;
  SparseArray<BFloat16> gate_up(2 * size), grad_h(size), h(size), grad_gate_up(2 * size);
  const auto gate_begin = 2 * size - row_size - 48, up_begin = 2 * size - 48;
  gate_up.fill(gate_begin, 48);
  gate_up.fill(up_begin, 48);
  grad_h.fill(size - 48, 48);
  detail::ActivationJob job{.op = detail::ActivationOp::kGatedBackward,
                            .activation = Activation::kSilu,
                            .type = detail::StorageType::kBFloat16,
                            .num_elements = size,
                            .row_size = row_size,
                            .grad_h = grad_h.at(0),
                            .x = gate_up.at(0),
                            .up = gate_up.at(row_size),
                            .h = h.at(0),
                            .grad_x = grad_gate_up.at(0),
                            .grad_up = grad_gate_up.at(row_size)};
  cuda::launch_activation(job, kDevice);

  SparseArray<BFloat16> last_h(48), last_grad_gate(48), last_grad_up(48);
  job.num_elements = 48;
  job.row_size = 0;
  job.grad_h = grad_h.at(size - 48);
  job.x = gate_up.at(gate_begin);
  job.up = gate_up.at(up_begin);
  job.h = last_h.at(0);
  job.grad_x = last_grad_gate.at(0);
  job.grad_up = last_grad_up.at(0);
  cuda::launch_activation(job, kDevice);
  EXPECT_EQ(values_of(h, size - 48, 48), values_of(last_h, 0, 48));
  EXPECT_EQ(values_of(grad_gate_up, gate_begin, 48), values_of(last_grad_gate, 0, 48));
  EXPECT_EQ(values_of(grad_gate_up, up_begin, 48), values_of(last_grad_up, 0, 48));
  EXPECT_NE(values_of(h, size - 48, 48), std::vector<double>(48, 0.0));
}

// More than 2^32 elements in two runs, whose positions need a division of 64-bit integers.
TEST_F(LargeArrays, DropoutIsExactBeyond2To32Elements) {
  const int64_t size = 2 * kTwoTo31 + 2048 + 48;
  const int64_t begin = size - 48;
  SparseArray<BFloat16> x(size), y(size);
  x.fill(begin, 48);
  detail::DropoutJob job{.type = detail::StorageType::kBFloat16,
                         .num_elements = size,
                         .run_size = size / 2,
                         .full_run_size = size,
                         .run_begin = size / 4,
                         .seed = 5,
                         .threshold = uint64_t{1} << 31,
                         .scale = 2,
                         .x = x.at(0),
                         .y = y.at(0)};
  cuda::launch_dropout(job, kDevice);

  SparseArray<BFloat16> last_y(48);
  job.num_elements = 48;
  job.run_size = 48;
  job.run_begin = size + size / 4 + (size / 2 - 48);
  job.x = x.at(begin);
  job.y = last_y.at(0);
  cuda::launch_dropout(job, kDevice);
  EXPECT_EQ(values_of(y, begin, 48), values_of(last_y, 0, 48));
  EXPECT_NE(values_of(y, begin, 48), std::vector<double>(48, 0.0));
}

// The last block has 40 elements.
TEST_F(LargeArrays, MomentumStepIsExactBeyond2To31Elements) {
  const int64_t size = kTwoTo31 + 2048 + 40;
  const int64_t begin = size - 40;
  SparseArray<BFloat16> parameter(size), grad(size);
  SparseArray<int8_t> codes(size);
  SparseArray<float> scales(size / 256 + 1);
  parameter.fill(begin, 40);
  grad.fill(begin, 40);
  SparseArray<BFloat16> last_parameter(40);
  SparseArray<int8_t> last_codes(40);
  SparseArray<float> last_scale(1);
  last_parameter.fill(0, 40);
  detail::MomentumStepJob job{};
  job.weight_format = detail::WeightFormat::kBFloat16;
  job.has_bfloat16_grad = true;
  job.state_format = detail::StateFormat::kCodes;
  job.num_rows = 1;
  job.row_size = size;
  job.full_columns = size;
  job.seed = 5;
  job.step = 1;
  job.parameter = parameter.at(0);
  job.grad = grad.at(0);
  job.first = {codes.at(0), scales.at(0)};
  job.constants = {.grad_sign = 1,
                   .grad_decay = 0,
                   .momentum = 0.9F,
                   .grad_weight = 1,
                   .lr = 0.1F,
                   .nesterov = 0,
                   .is_first = 1};
  cuda::launch_momentum_step(job, kDevice);

  job.row_size = 40;
  job.column = begin;
  job.parameter = last_parameter.at(0);
  job.grad = grad.at(begin);
  job.first = {last_codes.at(0), last_scale.at(0)};
  cuda::launch_momentum_step(job, kDevice);
  EXPECT_EQ(values_of(parameter, begin, 40), values_of(last_parameter, 0, 40));
  EXPECT_EQ(values_of(codes, begin, 40), values_of(last_codes, 0, 40));
  EXPECT_EQ(*scales.at(size / 256), *last_scale.at(0));
  EXPECT_GT(*last_scale.at(0), 0);
}

class LargeNorms : public LargeArrays {
 protected:
  static constexpr int64_t kRowSize = 512;
  static constexpr int64_t kRows = (kTwoTo31 >> 9) + 3;
  static constexpr int64_t kBegin = (kRows - 1) * kRowSize;  // of the last row
};

TEST_F(LargeNorms, ForwardIsExactBeyond2To31Elements) {
  SparseArray<BFloat16> x(kRows * kRowSize), residual(kRows * kRowSize), sum(kRows * kRowSize),
      y(kRows * kRowSize);
  SparseArray<float> mean(kRows), rstd(kRows);
  for (auto* each : {&x, &residual}) each->fill(kBegin, kRowSize);
  detail::NormForwardJob job{.type = detail::StorageType::kBFloat16,
                             .centered = true,
                             .params_in_compute_type = false,
                             .eps = 1e-5,
                             .num_rows = kRows,
                             .row_size = kRowSize,
                             .x = x.at(0),
                             .residual = residual.at(0),
                             .sum = sum.at(0),
                             .y = y.at(0),
                             .mean = mean.at(0),
                             .rstd = rstd.at(0)};
  cuda::launch_norm_forward(job, kDevice);

  SparseArray<BFloat16> last_sum(kRowSize), last_y(kRowSize);
  SparseArray<float> last_mean(1), last_rstd(1);
  job.num_rows = 1;
  job.x = x.at(kBegin);
  job.residual = residual.at(kBegin);
  job.sum = last_sum.at(0);
  job.y = last_y.at(0);
  job.mean = last_mean.at(0);
  job.rstd = last_rstd.at(0);
  cuda::launch_norm_forward(job, kDevice);
  EXPECT_EQ(values_of(sum, kBegin, kRowSize), values_of(last_sum, 0, kRowSize));
  EXPECT_EQ(values_of(y, kBegin, kRowSize), values_of(last_y, 0, kRowSize));
  EXPECT_EQ(*mean.at(kRows - 1), *last_mean.at(0));
  EXPECT_EQ(*rstd.at(kRows - 1), *last_rstd.at(0));
  EXPECT_GT(*rstd.at(kRows - 1), 0);
}

TEST_F(LargeNorms, BackwardIsExactBeyond2To31Elements) {
  SparseArray<BFloat16> grad_y(kRows * kRowSize), grad_sum(kRows * kRowSize), v(kRows * kRowSize),
      grad_v(kRows * kRowSize);
  SparseArray<float> rstd(kRows);
  for (auto* each : {&grad_y, &grad_sum, &v}) each->fill(kBegin, kRowSize);
  *rstd.at(kRows - 1) = 1.25F;
  detail::NormBackwardJob job{.type = detail::StorageType::kBFloat16,
                              .centered = false,
                              .params_in_compute_type = false,
                              .has_bias = false,
                              .num_rows = kRows,
                              .row_size = kRowSize,
                              .grad_y = grad_y.at(0),
                              .grad_sum = grad_sum.at(0),
                              .v = v.at(0),
                              .rstd = rstd.at(0),
                              .grad_v = grad_v.at(0)};
  cuda::launch_norm_backward(job, 0, nullptr, nullptr, kDevice);

  SparseArray<BFloat16> last_grad_v(kRowSize);
  job.num_rows = 1;
  job.grad_y = grad_y.at(kBegin);
  job.grad_sum = grad_sum.at(kBegin);
  job.v = v.at(kBegin);
  job.rstd = rstd.at(kRows - 1);
  job.grad_v = last_grad_v.at(0);
  cuda::launch_norm_backward(job, 0, nullptr, nullptr, kDevice);
  EXPECT_EQ(values_of(grad_v, kBegin, kRowSize), values_of(last_grad_v, 0, kRowSize));
  EXPECT_NE(values_of(grad_v, kBegin, kRowSize), std::vector<double>(kRowSize, 0.0));
}

class LargeCrossEntropy : public LargeArrays {
 protected:
  static constexpr int64_t kClasses = (1 << 16) + 8;
  static constexpr int64_t kRows = (kTwoTo31 >> 16) + 1;
  static constexpr int64_t kBegin = (kRows - 1) * kClasses;  // of the last row

  LargeCrossEntropy() {
    logits_.fill(kBegin, kClasses);
    *target_.at(kRows - 1) = kClasses - 3;
  }

  static detail::CrossEntropyTargets targets(const int64_t* target) {
    return {.target = target, .vocab_start = 0, .ignore_index = -100, .row_size = kClasses};
  }

  SparseArray<BFloat16> logits_{kRows * kClasses};
  SparseArray<int64_t> target_{kRows};
};

TEST_F(LargeCrossEntropy, StatisticsAreExactBeyond2To31Elements) {
  SparseArray<float> statistics(4 * kRows), last_statistics(4);
  detail::CrossEntropyStatisticsJob job{.type = detail::StorageType::kBFloat16,
                                        .wants_sum = true,
                                        .num_rows = kRows,
                                        .row_size = kClasses,
                                        .row_stride = kClasses,
                                        .targets = targets(target_.at(0)),
                                        .logits = logits_.at(0),
                                        .statistics = statistics.at(0)};
  cuda::launch_cross_entropy_statistics(job, kDevice);

  job.num_rows = 1;
  job.targets = targets(target_.at(kRows - 1));
  job.logits = logits_.at(kBegin);
  job.statistics = last_statistics.at(0);
  cuda::launch_cross_entropy_statistics(job, kDevice);
  EXPECT_EQ(values_of(statistics, 4 * (kRows - 1), 4), values_of(last_statistics, 0, 4));
  EXPECT_GT(*last_statistics.at(1), 1);
}

TEST_F(LargeCrossEntropy, GradientIsExactBeyond2To31Elements) {
  SparseArray<BFloat16> grad_logits(kRows * kClasses), last_grad_logits(kClasses);
  SparseArray<float> grad_losses(kRows), largest(kRows), log_sum(kRows);
  *grad_losses.at(kRows - 1) = 0.5F;
  *largest.at(kRows - 1) = 1.0F;
  *log_sum.at(kRows - 1) = 2.0F;
  detail::CrossEntropyGradientJob job{.type = detail::StorageType::kBFloat16,
                                      .num_rows = kRows,
                                      .row_size = kClasses,
                                      .row_stride = kClasses,
                                      .smoothing = 0.1,
                                      .smoothing_per_class = 0.1 / kClasses,
                                      .targets = targets(target_.at(0)),
                                      .logits = logits_.at(0),
                                      .grad_losses = grad_losses.at(0),
                                      .largest = largest.at(0),
                                      .log_sum = log_sum.at(0),
                                      .grad_logits = grad_logits.at(0)};
  cuda::launch_cross_entropy_gradient(job, kDevice);

  job.num_rows = 1;
  job.targets = targets(target_.at(kRows - 1));
  job.logits = logits_.at(kBegin);
  job.grad_losses = grad_losses.at(kRows - 1);
  job.largest = largest.at(kRows - 1);
  job.log_sum = log_sum.at(kRows - 1);
  job.grad_logits = last_grad_logits.at(0);
  cuda::launch_cross_entropy_gradient(job, kDevice);
  EXPECT_EQ(values_of(grad_logits, kBegin, kClasses), values_of(last_grad_logits, 0, kClasses));
  EXPECT_NE(values_of(grad_logits, kBegin, kClasses), std::vector<double>(kClasses, 0.0));
}

}  // namespace
}  // namespace weft::kernels::testing::index
