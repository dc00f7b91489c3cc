#include "norm_suite.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace weft::kernels::testing::norm {
namespace {

constexpr double kEps = 1e-5;

enum class Layout { kContiguous, kOffset, kTransposed };
enum class Params { kNone, kOfStorage, kOfComputeType };

struct Case {
  at::ScalarType type;
  Norm norm;
  int64_t num_rows;
  int64_t row_size;
  Layout layout;
  Params params;
  bool has_bias;
  bool has_residual;
  std::string_view unaligned = "";  // the name of an operand, or none
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  std::string name = std::string(c10::toString(c.type)) +
                     (c.norm == Norm::kRms ? "_rms_" : "_layer_") + std::to_string(c.num_rows) +
                     "_" + std::to_string(c.row_size);
  name += c.layout == Layout::kContiguous ? "" : c.layout == Layout::kOffset ? "_offset" : "_t";
  name += c.params == Params::kNone        ? "_plain"
          : c.params == Params::kOfStorage ? ""
                                           : "_compute_type";
  name += (c.has_bias ? "_bias" : "") + std::string(c.has_residual ? "_residual" : "");
  return c.unaligned.empty() ? name : name + "_unaligned_" + std::string(c.unaligned);
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const auto norm : {Norm::kRms, Norm::kLayer}) {
      int variant = 0;
      for (const int64_t row_size : {1, 7, 8, 33, 256, 1000, 4104, 34, 36}) {
        for (const int64_t num_rows : {1, 5, 29}) {
          const auto params = static_cast<Params>(variant % 3);
          cases.push_back({type,
                           norm,
                           num_rows,
                           row_size,
                           variant % 5 == 1 ? Layout::kOffset : Layout::kContiguous,
                           params,
                           params != Params::kNone && variant % 2 == 0,
                           variant % 4 < 2});
          ++variant;
        }
      }
      // The gradients of the parameters do not fit into the shared memory of a block. The emulated
      // devices run fewer than 7 blocks at a time.
      const int64_t large = type == at::kDouble ? 7200 : 14400;
      cases.push_back(
          {type, norm, 7, large, Layout::kContiguous, Params::kOfComputeType, true, true});
      cases.push_back(
          {type, norm, 3, large + 1, Layout::kContiguous, Params::kOfStorage, true, false});
      // The same without a bias: sums of a bias, if a kernel added them, would overwrite other
      // sums.
      if (type == at::kDouble && norm == Norm::kRms) {
        cases.push_back(
            {type, norm, 3, 2 * large, Layout::kContiguous, Params::kOfStorage, false, false});
      }
      // Rows that are too long for the registers of a block: in the backward; in the forward, too.
      cases.push_back(
          {type, norm, 7, 8200, Layout::kContiguous, Params::kOfComputeType, true, false});
      if (at::isReducedFloatingType(type)) {
        cases.push_back(
            {type, norm, 3, 16640, Layout::kContiguous, Params::kOfStorage, true, true});
      }
      // Every combination of options for rows of full packs, which the packed kernels process.
      for (const auto params : {Params::kNone, Params::kOfStorage, Params::kOfComputeType}) {
        for (const bool has_residual : {false, true}) {
          for (const auto layout : {Layout::kContiguous, Layout::kOffset, Layout::kTransposed}) {
            const bool has_bias = params != Params::kNone && layout != Layout::kTransposed;
            cases.push_back({type, norm, 5, 512, layout, params, has_bias, has_residual});
          }
        }
      }
      for (const char* name : {"x", "residual", "grad_y", "grad_sum", "weight", "bias"}) {
        const bool has_residual = std::string_view(name) != "x";  // the backward reads x, too
        cases.push_back({type,
                         norm,
                         5,
                         64,
                         Layout::kContiguous,
                         Params::kOfComputeType,
                         true,
                         has_residual,
                         name});
      }
    }
  }
  return cases;
}

std::vector<Case> cases_with_params() {
  std::vector<Case> cases = all_cases();
  std::erase_if(cases, [](const Case& c) { return c.params == Params::kNone; });
  return cases;
}

at::ScalarType compute_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

// One rounding to the type, and the sums' rounding in the compute type.
double tolerance_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return 1e-12;
    case at::kFloat:
      return 4e-6;
    case at::kBFloat16:
      return 0.00390625 * 1.01;
    default:
      return 0.00048828125 * 1.01;
  }
}

// Compares with the float64 oracle. The error is relative to the largest of a row's `terms`: the
// expected values are sums of them, and these sums may cancel.
void expect_close(const at::Tensor& actual,
                  const at::Tensor& expected,
                  const at::Tensor& terms,
                  double tolerance,
                  const char* what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (actual.numel() == 0) return;
  const at::Tensor values = actual.cpu().to(at::kDouble);
  const at::Tensor scale = terms.abs().amax(-1, /*keepdim=*/true).add(1e-6);
  const double error = ((values - expected).abs() / scale).max().item<double>();
  EXPECT_LE(error, tolerance) << what;
}

void expect_close(const at::Tensor& actual,
                  const at::Tensor& expected,
                  double tolerance,
                  const char* what) {
  expect_close(actual, expected, expected, tolerance, what);
}

struct Operands {
  at::Tensor x;
  std::optional<at::Tensor> residual;
  std::optional<at::Tensor> weight;
  std::optional<at::Tensor> bias;
  at::Tensor grad_y;
  std::optional<at::Tensor> grad_sum;
};

// Returns the values on the device under test, `offset` elements after the beginning of a storage.
at::Tensor at_offset(const at::Tensor& values, int64_t offset) {
  const auto options = values.options().device(kernels_under_test().device);
  const at::Tensor storage = at::empty({values.numel() + offset}, options);
  return storage.narrow(0, offset, values.numel()).view(values.sizes()).copy_(values);
}

// Returns the values in the dtype of the case and in `layout`, on the device under test.
at::Tensor laid_out(const at::Tensor& values, const Case& c, Layout layout) {
  const auto device = kernels_under_test().device;
  const at::Tensor typed = values.to(c.type);
  switch (layout) {
    case Layout::kOffset:  // contiguous, but no row is aligned for vector loads
      return at_offset(typed, 1);
    case Layout::kTransposed:
      return typed.t().contiguous().to(device).t();
    case Layout::kContiguous:
      break;
  }
  return typed.to(device);
}

Operands random(const Case& c) {
  const auto matrix = [&](const char* name, double mean) {
    return laid_out(at::randn({c.num_rows, c.row_size}, at::kDouble) + mean,
                    c,
                    c.unaligned == name ? Layout::kOffset : c.layout);
  };
  const auto vector = [&](const char* name, double mean) {
    const auto type = c.params == Params::kOfStorage ? c.type : compute_type(c.type);
    const at::Tensor values = (at::randn({c.row_size}, at::kDouble) + mean).to(type);
    // 16 bytes: a pack of float32 parameters has 32 bytes if the arrays are of a half type.
    return at_offset(values, c.unaligned == name ? 16 / values.element_size() : 0);
  };
  Operands operands{.x = matrix("x", 1),
                    .residual = {},
                    .weight = {},
                    .bias = {},
                    .grad_y = matrix("grad_y", 0),
                    .grad_sum = {}};
  if (c.has_residual) {
    operands.residual = matrix("residual", 0);
    operands.grad_sum = matrix("grad_sum", 0);
  }
  if (c.params != Params::kNone) operands.weight = vector("weight", 1);
  if (c.has_bias) operands.bias = vector("bias", 0);
  return operands;
}

at::Tensor in_double(const at::Tensor& tensor) { return tensor.cpu().to(at::kDouble); }

// The formulae of norm_job.h in float64.
struct Oracle {
  explicit Oracle(const Operands& operands, const at::Tensor& norm_input, const Case& c)
      : v(in_double(norm_input)) {
    const at::Tensor ones = at::ones({c.row_size}, at::kDouble);
    const at::Tensor weight = operands.weight ? in_double(*operands.weight) : ones;
    const at::Tensor bias = operands.bias ? in_double(*operands.bias) : at::zeros_like(ones);
    const bool centered = c.norm == Norm::kLayer;
    mean = centered ? v.mean(-1, /*keepdim=*/true) : at::zeros({c.num_rows, 1}, at::kDouble);
    const at::Tensor distance = v - mean;
    rstd = (distance.square().mean(-1, /*keepdim=*/true) + kEps).rsqrt();
    const at::Tensor n = distance * rstd;
    y = n * weight + bias;
    const at::Tensor grad_y = in_double(operands.grad_y);
    const at::Tensor g = grad_y * weight;
    grad_v = rstd * (g - n * (g * n).mean(-1, /*keepdim=*/true));
    if (centered) grad_v = grad_v - rstd * g.mean(-1, /*keepdim=*/true);
    if (operands.grad_sum) grad_v = grad_v + in_double(*operands.grad_sum);
    grad_v_terms = at::cat({rstd * g, rstd * n * (g * n).mean(-1, /*keepdim=*/true), grad_v}, -1);
    grad_params = at::stack({(grad_y * n).sum(0), grad_y.sum(0)});
  }

  at::Tensor v;
  at::Tensor mean;
  at::Tensor rstd;
  at::Tensor y;
  at::Tensor grad_v;
  at::Tensor grad_v_terms;
  at::Tensor grad_params;
};

class NormKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kernels_.available) GTEST_SKIP() << kernels_.unavailable_reason;
    at::manual_seed(7);
  }

  const KernelsUnderTest kernels_ = kernels_under_test();
};

class NormCases : public NormKernels, public ::testing::WithParamInterface<Case> {
 protected:
  NormResult forward(const Operands& operands) const {
    return kernels_.forward({.x = operands.x,
                             .residual = operands.residual,
                             .weight = operands.weight,
                             .bias = operands.bias,
                             .eps = kEps},
                            GetParam().norm);
  }

  NormGradients backward(const Operands& operands,
                         const NormResult& result,
                         NormWanted wanted) const {
    const auto mean = GetParam().norm == Norm::kLayer ? std::optional(result.mean) : std::nullopt;
    return kernels_.backward(operands.grad_y,
                             operands.grad_sum,
                             {.norm_input = operands.residual ? result.sum : operands.x,
                              .weight = operands.weight,
                              .mean = mean,
                              .rstd = result.rstd},
                             wanted);
  }
};

class NormCasesWithParams : public NormCases {};

TEST_P(NormCases, MatchTheOracle) {
  const Case& c = GetParam();
  const Operands operands = random(c);
  const double tolerance = tolerance_of(c.type);
  const NormResult result = forward(operands);
  if (operands.residual) {
    const auto type = compute_type(c.type);
    const at::Tensor sum = (operands.x.to(type) + operands.residual->to(type)).to(c.type);
    EXPECT_TRUE(at::equal(result.sum, sum)) << "the sum is rounded as it is stored";
  }
  const Oracle oracle(operands, operands.residual ? result.sum : operands.x, c);
  expect_close(result.y, oracle.y, tolerance, "y");
  expect_close(result.rstd.unsqueeze(-1), oracle.rstd, 1e-5, "rstd");
  if (c.norm == Norm::kLayer) expect_close(result.mean.unsqueeze(-1), oracle.mean, 1e-5, "mean");

  const bool has_weight = operands.weight.has_value();
  const NormGradients gradients =
      backward(operands, result, {.input = true, .params = has_weight, .bias = c.has_bias});
  // The saved statistics are rounded to the compute type.
  expect_close(
      gradients.input, oracle.grad_v, oracle.grad_v_terms, 2 * tolerance, "gradient of the input");
  if (!has_weight) return;
  expect_close(gradients.params,
               oracle.grad_params.narrow(0, 0, c.has_bias ? 2 : 1),
               std::max(2 * tolerance, 1e-5),
               "gradients of the parameters");
}

TEST_P(NormCasesWithParams, GradientsDoNotDependOnWhatElseIsWanted) {
  const Case& c = GetParam();
  const Operands operands = random(c);
  const NormResult result = forward(operands);
  const NormGradients both =
      backward(operands, result, {.input = true, .params = true, .bias = c.has_bias});
  const NormGradients input =
      backward(operands, result, {.input = true, .params = false, .bias = false});
  const NormGradients params =
      backward(operands, result, {.input = false, .params = true, .bias = c.has_bias});
  EXPECT_TRUE(at::equal(both.input, input.input));
  EXPECT_TRUE(at::equal(both.params, params.params));
  EXPECT_FALSE(input.params.defined());
  EXPECT_FALSE(params.input.defined());
}

INSTANTIATE_TEST_SUITE_P(All, NormCases, ::testing::ValuesIn(all_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(All,
                         NormCasesWithParams,
                         ::testing::ValuesIn(cases_with_params()),
                         case_name);

// The variance is far smaller than the mean of the squares.
TEST_F(NormKernels, LargeMeansKeepTheirDigits) {
  const at::Tensor x = (at::randn({5, 1000}, at::kDouble) + 1000).to(at::kFloat);
  const NormResult result = kernels_.forward(
      {.x = x.to(kernels_.device), .residual = {}, .weight = {}, .bias = {}, .eps = kEps},
      Norm::kLayer);
  const at::Tensor variance = in_double(x).var(-1, /*unbiased=*/false);
  // The mean is rounded to some units in the last place of 1000.
  expect_close(result.rstd, (variance + kEps).rsqrt(), 1e-5, "rstd");
}

}  // namespace
}  // namespace weft::kernels::testing::norm
