// The cross-entropy's kernels on the CPU: the suite, every instruction set, several numbers of
// threads, and errors.
#include "cross_entropy_job.h"
#include "cross_entropy_suite.h"
#include "instruction_sets.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace weft::kernels::testing::cross_entropy {

KernelsUnderTest kernels_under_test() {
  return {.device = c10::DeviceType::CPU,
          .available = true,
          .unavailable_reason = "",
          .statistics = cpu::cross_entropy_statistics,
          .gradient = cpu::cross_entropy_gradient};
}

namespace {

constexpr int64_t kRows = 67;
constexpr int64_t kSize = 1100;  // two tiles and a partial one

struct Inputs {
  at::Tensor logits = at::randn({kRows, kSize}) * 3;
  at::Tensor target = at::randint(-1, kSize, {kRows}, at::kLong);
  at::Tensor grad_losses = at::randn({kRows});

  Inputs() {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    logits[3][700] = std::numeric_limits<double>::quiet_NaN();
    logits[4][kSize - 1] = kInfinity;
    logits[5].fill_(-kInfinity);
    logits[6].slice(0, 0, kSize - 1).fill_(-kInfinity);
  }
};

struct Results {
  at::Tensor statistics;
  at::Tensor normalizers;
  at::Tensor gradient;
};

Results run(const Inputs& in) {
  Results results;
  results.statistics = cpu::cross_entropy_statistics({.logits = in.logits,
                                                      .target = in.target,
                                                      .vocab_start = 0,
                                                      .ignore_index = -1,
                                                      .wants_sum = true});
  results.normalizers = results.statistics.slice(1, 0, 2).t().contiguous();
  results.normalizers[1].log_();
  results.gradient = at::empty_like(in.logits);
  cpu::cross_entropy_gradient({.grad_losses = in.grad_losses,
                               .logits = in.logits,
                               .target = in.target,
                               .normalizers = results.normalizers,
                               .vocab_start = 0,
                               .num_classes = kSize,
                               .ignore_index = -1,
                               .label_smoothing = 0.1},
                              results.gradient);
  return results;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.view(at::kInt), b.view(at::kInt));
}

TEST(CrossEntropyThreads, GiveTheSameBits) {
  const Inputs in;
  const int num_threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = run(in);
  for (const int threads : {2, 3, 5}) {
    at::set_num_threads(threads);
    const auto several = run(in);
    EXPECT_TRUE(same_bits(one.statistics, several.statistics)) << threads;
    EXPECT_TRUE(same_bits(one.gradient, several.gradient)) << threads;
  }
  at::set_num_threads(num_threads);
}

TEST(CrossEntropyInstructionSets, AgreeWithEachOther) {
  const Inputs in;
  const auto expected = run(in);
  const detail::CrossEntropyTargets targets = {.target = in.target.const_data_ptr<int64_t>(),
                                               .vocab_start = 0,
                                               .ignore_index = -1,
                                               .row_size = kSize};
  for (const auto& set : cpu::supported_instruction_sets()) {
    SCOPED_TRACE(set.name);
    const at::Tensor statistics = at::empty({kRows, 4});
    const at::Tensor gradient = at::empty_like(in.logits);
    const detail::CrossEntropyStatisticsJob forward = {.type = detail::StorageType::kFloat32,
                                                       .wants_sum = true,
                                                       .num_rows = kRows,
                                                       .row_size = kSize,
                                                       .row_stride = kSize,
                                                       .targets = targets,
                                                       .logits = in.logits.const_data_ptr(),
                                                       .statistics = statistics.mutable_data_ptr()};
    const detail::CrossEntropyGradientJob backward = {
        .type = detail::StorageType::kFloat32,
        .num_rows = kRows,
        .row_size = kSize,
        .row_stride = kSize,
        .smoothing = 0.1,
        .smoothing_per_class = 0.1 / kSize,
        .targets = targets,
        .logits = in.logits.const_data_ptr(),
        .grad_losses = in.grad_losses.const_data_ptr(),
        .largest = expected.normalizers[0].const_data_ptr(),
        .log_sum = expected.normalizers[1].const_data_ptr(),
        .grad_logits = gradient.mutable_data_ptr()};
    // In two ranges, as with two threads.
    set.loops.cross_entropy_statistics(forward, 0, 20);
    set.loops.cross_entropy_statistics(forward, 20, kRows);
    set.loops.cross_entropy_gradient(backward, 0, 11);
    set.loops.cross_entropy_gradient(backward, 11, kRows);
    // 1e-4 is for the sum of the logits, which is near 0.
    EXPECT_TRUE(at::allclose(statistics, expected.statistics, 1e-6, 1e-4, /*equal_nan=*/true));
    EXPECT_TRUE(at::allclose(gradient, expected.gradient, 1e-5, 1e-7, /*equal_nan=*/true));
  }
}

TEST(CrossEntropyErrors, NameTheMismatch) {
  const auto error_of = [](const at::Tensor& logits, const at::Tensor& target) {
    try {
      cpu::cross_entropy_statistics({.logits = logits,
                                     .target = target,
                                     .vocab_start = 0,
                                     .ignore_index = -1,
                                     .wants_sum = false});
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string("none");
  };
  const at::Tensor logits = at::ones({2, 5});
  const at::Tensor target = at::zeros({2}, at::kLong);
  EXPECT_EQ(error_of(logits, target), "none");
  EXPECT_EQ(
      error_of(logits, at::zeros({3}, at::kLong)),
      "cross_entropy got target of shape [3] for logits of shape [2, 5]; pass a last dim with "
      "one entry per row of the logits.");
  EXPECT_EQ(
      error_of(logits, at::zeros({2})),
      "cross_entropy got target of Float [2]; pass a tensor with one dim, of int64 or int32.");
  EXPECT_EQ(error_of(at::ones({5}), target),
            "cross_entropy got logits of shape [5]; pass a matrix, a row for each token.");
  EXPECT_EQ(error_of(logits.to(at::kLong), target),
            "cross_entropy got logits of dtype Long; convert to float32, float64, bfloat16 or "
            "float16.");
  EXPECT_EQ(error_of(logits.to(at::kMeta), target),
            "cross_entropy got logits on meta in the kernel for cpu; call the kernel of the "
            "tensor's own device.");
  const at::Tensor normalizers = at::zeros({2, 2});
  const auto write = [&](const at::Tensor& gradient) {
    cpu::cross_entropy_gradient({.grad_losses = at::ones({2}),
                                 .logits = logits,
                                 .target = target,
                                 .normalizers = normalizers,
                                 .vocab_start = 0,
                                 .num_classes = 5,
                                 .ignore_index = -1,
                                 .label_smoothing = 0},
                                gradient);
  };
  EXPECT_NO_THROW(write(at::empty({2, 5})));
  EXPECT_THROW(write(at::empty({5, 2}).t()), c10::Error);
  EXPECT_THROW(write(at::empty({2, 5}, at::kDouble)), c10::Error);
}

}  // namespace
}  // namespace weft::kernels::testing::cross_entropy
