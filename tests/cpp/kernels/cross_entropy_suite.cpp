#include "cross_entropy_suite.h"

#include "cross_entropy_reference.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace weft::kernels::testing::cross_entropy {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kStart = 1000;  // the class of the first column
constexpr int64_t kIgnored = -100;
constexpr double kNumClasses = 100000;

enum class Layout { kContiguous, kTransposed, kSliced };

struct Case {
  at::ScalarType type;
  int64_t size;
  Layout layout;
  double smoothing;
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  const char* layout = c.layout == Layout::kContiguous ? ""
                       : c.layout == Layout::kSliced   ? "_sliced"
                                                       : "_transposed";
  return std::string(c10::toString(c.type)) + "_" + std::to_string(c.size) + layout +
         (c.smoothing == 0 ? "" : "_smoothing");
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const double smoothing : {0.0, 0.1}) {
      for (const int64_t size : {1, 2, 7, 33, 512, 513, 1100, 4099, 70001}) {
        cases.push_back({type, size, Layout::kContiguous, smoothing});
      }
      cases.push_back({type, 1100, Layout::kTransposed, smoothing});
      cases.push_back({type, 1101, Layout::kSliced, smoothing});
    }
  }
  return cases;
}

at::ScalarType scalar_of(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

// Relative: some units in the last place of float32; in float64, the rounding error of the
// reference's plain sums.
double tolerance_of(at::ScalarType type) { return type == at::kDouble ? 1e-12 : 2e-6; }

// Relative, for the one rounding of bfloat16 and float16: half a unit in the last place.
double rounding_of(at::ScalarType type) {
  return type == at::kBFloat16 ? 0.00390625 * 1.001 : type == at::kHalf ? 0.00048828125 * 1.001 : 0;
}

std::vector<double> row_of(const at::Tensor& matrix, int64_t row) {
  const at::Tensor values = matrix.select(0, row).cpu().to(at::kDouble).contiguous();
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

void expect_near(double actual, double expected, double allowed, const std::string& what) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(actual)) << what << ": " << actual;
  } else if (std::isinf(expected) || allowed == 0) {
    EXPECT_EQ(actual, expected) << what;
  } else {
    EXPECT_NEAR(actual, expected, allowed) << what;
  }
}

class CrossEntropyKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kernels_.available) GTEST_SKIP() << kernels_.unavailable_reason;
    at::manual_seed(7);
  }

  at::Tensor on_device(const at::Tensor& tensor) const { return tensor.to(kernels_.device); }

  at::Tensor statistics_of(const at::Tensor& logits,
                           const at::Tensor& target,
                           bool wants_sum) const {
    return kernels_.statistics({.logits = logits,
                                .target = on_device(target),
                                .vocab_start = kStart,
                                .ignore_index = kIgnored,
                                .wants_sum = wants_sum});
  }

  void write_gradient(const at::Tensor& gradient,
                      const at::Tensor& grad,
                      const at::Tensor& logits,
                      const at::Tensor& target,
                      const at::Tensor& normalizers,
                      double smoothing) const {
    kernels_.gradient({.grad_losses = on_device(grad),
                       .logits = logits,
                       .target = on_device(target),
                       .normalizers = on_device(normalizers),
                       .vocab_start = kStart,
                       .num_classes = static_cast<int64_t>(kNumClasses),
                       .ignore_index = kIgnored,
                       .label_smoothing = smoothing},
                      gradient);
  }

  // Targets in the first and the last column, two of other shards, an ignored one, and one in the
  // first column again.
  static at::Tensor targets(int64_t size) {
    return at::tensor({kStart, kStart + size - 1, kStart - 1, kStart + size, kIgnored, kStart});
  }

  static int64_t column_of(const at::Tensor& target, int64_t row, int64_t size) {
    const int64_t column = target[row].item<int64_t>() - kStart;
    return column >= 0 && column < size ? column : -1;
  }

  void expect_statistics(const at::Tensor& logits, const at::Tensor& target, bool with_sum) const {
    const at::Tensor actual = statistics_of(logits, target, with_sum);
    ASSERT_EQ(actual.sizes(), at::IntArrayRef({logits.size(0), 4}));
    ASSERT_EQ(actual.scalar_type(), scalar_of(logits.scalar_type()));
    for (int64_t row = 0; row < logits.size(0); ++row) {
      SCOPED_TRACE("row " + std::to_string(row));
      const auto values = row_of(logits, row);
      const auto expected = reference::statistics(values, column_of(target, row, logits.size(1)));
      const auto found = row_of(actual, row);
      double magnitude = 0;
      for (const double value : values) magnitude += std::abs(value);
      const double tolerance = tolerance_of(logits.scalar_type());
      expect_near(found[0], expected.largest, 0, "largest");
      expect_near(found[1], expected.sum, tolerance * expected.sum, "sum of exponentials");
      expect_near(found[2], expected.target_logit, 0, "logit of the target");
      expect_near(
          found[3], with_sum ? expected.total : 0, with_sum ? tolerance * magnitude : 0, "sum");
    }
  }

  void expect_gradient(const at::Tensor& actual,
                       const at::Tensor& logits,
                       const at::Tensor& grad,
                       const at::Tensor& target,
                       const at::Tensor& normalizers,
                       double smoothing) const {
    const auto type = logits.scalar_type();
    for (int64_t row = 0; row < logits.size(0); ++row) {
      const auto values = row_of(logits, row);
      const auto found = row_of(actual, row);
      const double grad_loss = grad[row].item<double>();
      const reference::Normalizers normalizers_of_row = {normalizers[0][row].item<double>(),
                                                         normalizers[1][row].item<double>()};
      const bool is_ignored = target[row].item<int64_t>() == kIgnored;
      const int64_t column = column_of(target, row, logits.size(1));
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double p = reference::probability(values[i], normalizers_of_row);
        const double distance =
            std::isinf(values[i]) ? 0 : std::abs(values[i] - normalizers_of_row.largest);
        const bool is_target = static_cast<int64_t>(i) == column;
        const double expected =
            is_ignored ? 0 : reference::gradient(grad_loss, p, is_target, smoothing, kNumClasses);
        // The rounding errors of the exponent's terms add up; at the target, the sum cancels.
        const double exponent = 1 + distance + std::abs(normalizers_of_row.log_sum);
        const double terms = p * exponent + smoothing / kNumClasses + (is_target ? 0.1 : 0);
        const double allowed = tolerance_of(type) * std::abs(grad_loss) * terms +
                               rounding_of(type) * std::abs(expected) +
                               (type == at::kHalf ? 3.0e-8 : 1e-38);  // half a subnormal
        expect_near(found[i],
                    expected,
                    is_ignored ? 0 : allowed,
                    "row " + std::to_string(row) + ", column " + std::to_string(i));
        if (HasFailure()) return;
      }
    }
  }

  const KernelsUnderTest kernels_ = kernels_under_test();
};

class CrossEntropyCases : public CrossEntropyKernels, public ::testing::WithParamInterface<Case> {
 protected:
  at::Tensor random(const at::Tensor& target) const {
    const Case& c = GetParam();
    const int64_t rows = target.numel();
    const auto finish = [&](const at::Tensor& values) {
      return on_device((values * 3 + 40).to(c.type));
    };
    switch (c.layout) {
      case Layout::kTransposed:
        return finish(at::randn({c.size, rows}, at::kDouble)).t();
      case Layout::kSliced:  // rows have gaps between them and are not aligned for vector loads
        return finish(at::randn({rows, c.size + 2}, at::kDouble)).narrow(1, 1, c.size);
      case Layout::kContiguous:
        break;
    }
    return finish(at::randn({rows, c.size}, at::kDouble));
  }

  // Normalizers as if the other shards had three times the sum of exponentials of this one and, in
  // row 2, a logit that is larger by 1.
  static at::Tensor normalizers_of(const at::Tensor& logits) {
    at::Tensor result = at::empty({2, logits.size(0)}, at::kDouble);
    for (int64_t row = 0; row < logits.size(0); ++row) {
      const auto statistics = reference::statistics(row_of(logits, row), -1);
      const double more = row == 2 ? 1 : 0;
      result[0][row] = statistics.largest + more;
      result[1][row] = std::log(4 * statistics.sum) - more;
    }
    return result.to(scalar_of(logits.scalar_type()));
  }
};

TEST_P(CrossEntropyCases, StatisticsMatchReference) {
  const at::Tensor target = targets(GetParam().size);
  expect_statistics(random(target), target, GetParam().smoothing != 0);
}

TEST_P(CrossEntropyCases, GradientMatchesReference) {
  const Case& c = GetParam();
  const at::Tensor target = targets(c.size);
  const at::Tensor logits = random(target);
  const at::Tensor normalizers = normalizers_of(logits);
  const at::Tensor grad = at::randn({target.numel()}, at::kDouble).to(scalar_of(c.type));
  const at::Tensor gradient = at::empty(logits.sizes(), logits.options());
  write_gradient(gradient, grad, logits, target, normalizers, c.smoothing);
  expect_gradient(gradient, logits, grad, target, normalizers, c.smoothing);

  // The gradient is bitwise equal at an unaligned address, and in place.
  const at::Tensor unaligned =
      at::empty({logits.numel() + 1}, logits.options()).narrow(0, 1, logits.numel());
  write_gradient(unaligned.view(logits.sizes()), grad, logits, target, normalizers, c.smoothing);
  EXPECT_TRUE(at::equal(unaligned.view(logits.sizes()), gradient));
  const at::Tensor in_place = logits.contiguous().clone();
  write_gradient(in_place, grad, in_place, target, normalizers, c.smoothing);
  EXPECT_TRUE(at::equal(in_place, gradient));
}

INSTANTIATE_TEST_SUITE_P(All, CrossEntropyCases, ::testing::ValuesIn(all_cases()), case_name);

// Rows with special values in one place, and ordinary or masked-out logits elsewhere.
TEST_F(CrossEntropyKernels, SpecialValuesMatchTheReference) {
  const std::vector<std::vector<double>> specials = {{kNaN},
                                                     {kInfinity},
                                                     {-kInfinity},
                                                     {kInfinity, kNaN},
                                                     {kNaN, kInfinity},
                                                     {-kInfinity, kNaN},
                                                     {kInfinity, -kInfinity},
                                                     {3e38, -3e38},
                                                     {-3e38, 1e30}};
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const double elsewhere : {0.5, -kInfinity}) {
      for (const auto& special : specials) {
        for (const int64_t position : {0, 3, 1500}) {
          const auto count = static_cast<int64_t>(special.size());
          at::Tensor logits =
              at::full({3, position + count + position / 2}, elsewhere, at::kDouble);
          logits.narrow(1, position, count).copy_(at::tensor(special, at::kDouble));
          const at::Tensor target =
              at::tensor({kStart + position, kStart + position + count, kIgnored});
          logits = on_device(logits.to(type));
          SCOPED_TRACE(std::string(c10::toString(type)) + ", " + std::to_string(special[0]) +
                       " at " + std::to_string(position) + " among " + std::to_string(elsewhere));
          expect_statistics(logits, target, /*with_sum=*/false);

          const at::Tensor grad = at::ones({3});
          const at::Tensor normalizers =
              statistics_of(logits, target, false).cpu().slice(1, 0, 2).t().contiguous();
          normalizers[1].log_();
          const at::Tensor gradient = at::empty_like(logits);
          write_gradient(gradient, grad, logits, target, normalizers, 0.1);
          expect_gradient(gradient, logits, grad, target, normalizers, 0.1);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(CrossEntropyKernels, LargeLogitsKeepTheirDigits) {
  const at::Tensor logits =
      on_device(at::tensor({1e8, 1e8 + 0.5, 1e8 - 1}, at::kDouble).unsqueeze(0));
  const at::Tensor target = at::tensor({kStart + 1});
  expect_statistics(logits, target, true);
  // In a growing row every tile has a larger logit than the tile before.
  const at::Tensor growing = on_device(at::arange(5000, at::kFloat).unsqueeze(0));
  expect_statistics(growing, target, true);
  expect_statistics(growing.flip(1), target, true);
}

// In float32 the exponent keeps its digits if the largest logit is subtracted before log_sum.
TEST_F(CrossEntropyKernels, LargeLogitsHaveExactGradients) {
  const at::Tensor logits = on_device((at::randn({1, 100}) * 4).round() + 1e6);
  const at::Tensor target = at::tensor({kStart + 1});
  const at::Tensor normalizers = statistics_of(logits, target, false).cpu().slice(1, 0, 2).t();
  normalizers[1].log_();
  const at::Tensor gradient = at::empty_like(logits);
  write_gradient(gradient, at::ones({1}), logits, target, normalizers, 0.1);
  expect_gradient(gradient, logits, at::ones({1}), target, normalizers, 0.1);
}

// More rows than any device runs blocks at a time.
TEST_F(CrossEntropyKernels, ABlockMayProcessSeveralRows) {
  for (const auto& [rows, size] : {std::pair<int64_t, int64_t>{5000, 7}, {60, 1100}}) {
    const at::Tensor target = at::randint(kStart, kStart + size, {rows}, at::kLong);
    expect_statistics(on_device(at::randn({rows, size}) * 3), target, true);
  }
}

// More rows than a grid may have blocks in its second dim.
TEST_F(CrossEntropyKernels, GradientMayHaveMoreRowsThanAGrid) {
  constexpr int64_t kManyRows = 65537;
  const at::Tensor grad = at::rand({kManyRows}) + 1;
  const at::Tensor logits = on_device(at::zeros({kManyRows, 1}));
  const at::Tensor target = at::full({kManyRows}, kStart, at::kLong);
  const at::Tensor gradient = at::zeros_like(logits);
  write_gradient(gradient, grad, logits, target, at::zeros({2, kManyRows}), 0.5);
  // The probability of the only class is 1.
  const at::Tensor expected = grad * (0.5 - 0.5 / kNumClasses);
  EXPECT_TRUE(at::allclose(gradient.cpu().squeeze(1), expected, 1e-5));
}

// A row begins more than 2^31 elements after the first. Only the pages of the rows are touched.
TEST_F(CrossEntropyKernels, RowsMayBeginBeyond2To31Elements) {
  constexpr int64_t kStride = (int64_t{1} << 30) + 8;
  const at::Tensor storage =
      at::empty({2 * kStride + 33}, at::TensorOptions(at::kBFloat16).device(kernels_.device));
  const at::Tensor logits = storage.as_strided({3, 33}, {kStride, 1});
  logits.copy_(at::randn({3, 33}));
  const at::Tensor target = at::tensor({kStart, kStart + 5, kStart + 32});
  expect_statistics(logits, target, true);
  const at::Tensor normalizers = at::ones({2, 3});
  const at::Tensor gradient = at::empty({3, 33}, storage.options());
  write_gradient(gradient, at::ones({3}), logits, target, normalizers, 0.1);
  expect_gradient(gradient, logits, at::ones({3}), target, normalizers, 0.1);
}

TEST_F(CrossEntropyKernels, IgnoredClassMayBelongToThisShard) {
  const at::Tensor logits = on_device(at::randn({2, 33}) + 5);
  const at::Tensor target = at::tensor({kStart + 7, kStart + 8});
  const int64_t ignored = kStart + 7;
  const at::Tensor statistics = kernels_.statistics({.logits = logits,
                                                     .target = on_device(target),
                                                     .vocab_start = kStart,
                                                     .ignore_index = ignored,
                                                     .wants_sum = false});
  EXPECT_EQ(statistics[0][2].item<double>(), 0);
  EXPECT_EQ(statistics[1][2].item<double>(), logits[1][8].item<double>());
  const at::Tensor gradient = at::empty_like(logits);
  kernels_.gradient({.grad_losses = on_device(at::ones({2})),
                     .logits = logits,
                     .target = on_device(target),
                     .normalizers = on_device(at::ones({2, 2})),
                     .vocab_start = kStart,
                     .num_classes = 33,
                     .ignore_index = ignored,
                     .label_smoothing = 0.1},
                    gradient);
  EXPECT_EQ(gradient[0].count_nonzero().item<int64_t>(), 0);
  EXPECT_NE(gradient[1].count_nonzero().item<int64_t>(), 0);
}

TEST_F(CrossEntropyKernels, ShardsMayHaveNoClassesOrNoTokens) {
  const at::Tensor none =
      statistics_of(on_device(at::empty({2, 0})), at::tensor({kStart, kIgnored}), true);
  EXPECT_TRUE(
      at::equal(none.cpu(), at::tensor({-kInfinity, 0.0, 0.0, 0.0}).to(at::kFloat).expand({2, 4})));
  const at::Tensor no_tokens = at::empty({0}, at::kLong);
  EXPECT_EQ(statistics_of(on_device(at::empty({0, 5})), no_tokens, true).sizes(),
            at::IntArrayRef({0, 4}));
  for (const auto& logits : {at::empty({2, 0}), at::empty({0, 5})}) {
    const at::Tensor gradient = on_device(logits);
    const at::Tensor target = at::full({logits.size(0)}, kStart, at::kLong);
    write_gradient(gradient,
                   at::ones({logits.size(0)}),
                   gradient,
                   target,
                   at::zeros({2, logits.size(0)}),
                   0.1);
  }
}

TEST_F(CrossEntropyKernels, AcceptTargetsOf32Bits) {
  const at::Tensor logits = on_device(at::randn({6, 33}));
  const at::Tensor target = targets(33);
  EXPECT_TRUE(at::equal(statistics_of(logits, target, true),
                        statistics_of(logits, target.to(at::kInt), true)));
}

}  // namespace
}  // namespace weft::kernels::testing::cross_entropy
