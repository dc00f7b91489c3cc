#include "activation_suite.h"

#include "activation_reference.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

namespace weft::kernels::testing {
namespace {

enum class Layout { kContiguous, kTransposed, kSliced, kOffset };

struct Case {
  at::ScalarType type;
  Activation activation;
  std::vector<int64_t> shape;
  Layout layout;
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  std::string name = std::string(c10::toString(c.type)) + "_" + name_of(c.activation);
  for (const int64_t size : c.shape) name.append("_").append(std::to_string(size));
  name += c.layout == Layout::kContiguous ? ""
          : c.layout == Layout::kSliced   ? "_sliced"
          : c.layout == Layout::kOffset   ? "_offset"
                                          : "_transposed";
  return name;
}

std::vector<Case> all_cases() {
  const std::vector<std::vector<int64_t>> shapes = {
      {1}, {7}, {33}, {8, 171}, {3, 5, 65}, {0, 16}, {4, 0}, {1, 70001}, {600, 3}};
  std::vector<Case> cases;
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const auto activation :
         {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu}) {
      for (const auto& shape : shapes) {
        cases.push_back({type, activation, shape, Layout::kContiguous});
      }
      cases.push_back({type, activation, {8, 171}, Layout::kTransposed});
      cases.push_back({type, activation, {8, 171}, Layout::kSliced});
      cases.push_back({type, activation, {8, 171}, Layout::kOffset});
    }
  }
  return cases;
}

at::Tensor random(const Case& c) {
  const auto shape = at::IntArrayRef(c.shape);
  const auto finish = [&](const at::Tensor& values) {
    return (values * 3).to(c.type).to(kernels_under_test().device);
  };
  switch (c.layout) {
    case Layout::kTransposed:
      return finish(at::randn({shape[1], shape[0]}, at::kDouble)).t();
    case Layout::kSliced:
      return finish(at::randn({shape[0], shape[1] + 2}, at::kDouble)).narrow(1, 1, shape[1]);
    case Layout::kOffset:  // contiguous, but not aligned for vector loads
      return finish(at::randn({shape[0] * shape[1] + 1}, at::kDouble))
          .narrow(0, 1, shape[0] * shape[1])
          .view(shape);
    case Layout::kContiguous:
      break;
  }
  return finish(at::randn(shape, at::kDouble));
}

// Returns the elements in double.
std::vector<double> values_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.cpu().to(at::kDouble).contiguous();
  const auto* begin = values.const_data_ptr<double>();
  return {begin, begin + values.numel()};
}

// float and double: some units in the last place. Half types: half a unit in the last place, for
// one rounding.
double relative_tolerance(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return 1e-6;
    case at::kDouble:
      return 1e-14;
    case at::kBFloat16:
      return 0.00390625 * 1.001;
    default:
      return 0.00048828125 * 1.001;
  }
}

// The error is relative to the expected value plus a tenth of `magnitude`, the product of the
// factors' absolute values: sums cancel near a zero of the derivative, and in the tails of the
// textbook formulae.
void expect_close(const std::string& what,
                  const at::Tensor& actual,
                  const std::function<double(std::size_t)>& expected,
                  const std::function<double(std::size_t)>& magnitude) {
  const double tolerance = relative_tolerance(actual.scalar_type());
  const double smallest = actual.scalar_type() == at::kHalf ? 3.0e-8 : 1e-38;  // half a subnormal
  const auto values = values_of(actual);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double allowed = tolerance * (std::abs(expected(i)) + 0.1 * magnitude(i)) + smallest;
    ASSERT_NEAR(values[i], expected(i), allowed) << what << ", element " << i;
  }
}

class ActivationKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kernels_.available) GTEST_SKIP() << kernels_.unavailable_reason;
    at::manual_seed(7);
  }

  at::Tensor on_device(const at::Tensor& tensor) const { return tensor.to(kernels_.device); }

  const KernelsUnderTest kernels_ = kernels_under_test();
};

class ActivationCases : public ActivationKernels, public ::testing::WithParamInterface<Case> {
 protected:
  void expect_result_like(const at::Tensor& result, const at::Tensor& input) {
    EXPECT_EQ(result.sizes(), input.sizes());
    EXPECT_EQ(result.scalar_type(), input.scalar_type());
    EXPECT_EQ(result.device(), input.device());
    EXPECT_TRUE(result.is_contiguous());
  }
};

TEST_P(ActivationCases, PlainMatchesReference) {
  const Case& c = GetParam();
  const at::Tensor x = random(c);
  const at::Tensor grad_h = random(c);
  const auto points = values_of(x);
  const auto grads = values_of(grad_h);

  const at::Tensor h = kernels_.activation_forward(x, c.activation);
  const auto [grad_x, h_again] = kernels_.activation_backward(grad_h, x, c.activation);

  for (const auto& result : {h, grad_x, h_again}) expect_result_like(result, x);
  const auto value = [&](std::size_t i) { return reference::value(c.activation, points[i]); };
  const auto value_scale = [&](std::size_t i) { return std::abs(points[i]); };
  expect_close("h", h, value, value_scale);
  expect_close("h of backward", h_again, value, value_scale);
  expect_close(
      "grad_x",
      grad_x,
      [&](std::size_t i) { return grads[i] * reference::slope(c.activation, points[i]); },
      [&](std::size_t i) { return std::abs(grads[i]) * (1 + std::abs(points[i])); });
}

TEST_P(ActivationCases, GatedMatchesReference) {
  const Case& c = GetParam();
  const at::Tensor gate = random(c);
  const at::Tensor up = random(c);
  const at::Tensor grad_h = random(c);
  const auto gates = values_of(gate);
  const auto ups = values_of(up);
  const auto grads = values_of(grad_h);

  const at::Tensor h = kernels_.gated_forward(gate, up, c.activation);
  const auto [grad_gate, grad_up, h_again] =
      kernels_.gated_backward(grad_h, gate, up, c.activation);

  for (const auto& result : {h, grad_gate, grad_up, h_again}) expect_result_like(result, gate);
  const auto value = [&](std::size_t i) {
    return reference::value(c.activation, gates[i]) * ups[i];
  };
  const auto value_scale = [&](std::size_t i) { return std::abs(gates[i] * ups[i]); };
  expect_close("h", h, value, value_scale);
  expect_close("h of backward", h_again, value, value_scale);
  expect_close(
      "grad_gate",
      grad_gate,
      [&](std::size_t i) { return grads[i] * ups[i] * reference::slope(c.activation, gates[i]); },
      [&](std::size_t i) { return std::abs(grads[i] * ups[i]) * (1 + std::abs(gates[i])); });
  expect_close(
      "grad_up",
      grad_up,
      [&](std::size_t i) { return grads[i] * reference::value(c.activation, gates[i]); },
      [&](std::size_t i) { return std::abs(grads[i] * gates[i]); });
}

// The same kernel computes with other positions, so that no bit differs.
TEST_P(ActivationCases, GateUpMatchesGated) {
  const Case& c = GetParam();
  const at::Tensor gate = random(c);
  const at::Tensor up = random(c);
  const at::Tensor grad_h = random(c);
  const at::Tensor gate_up = at::cat({gate, up}, -1);

  const at::Tensor h = kernels_.gate_up_forward(gate_up, c.activation);
  const auto [grad_gate_up, h_again] = kernels_.gate_up_backward(grad_h, gate_up, c.activation);

  expect_result_like(h, gate);
  expect_result_like(h_again, gate);
  expect_result_like(grad_gate_up, gate_up);
  EXPECT_TRUE(at::equal(h, kernels_.gated_forward(gate, up, c.activation)));
  const auto [grad_gate, grad_up, expected_h] =
      kernels_.gated_backward(grad_h, gate, up, c.activation);
  EXPECT_TRUE(at::equal(h_again, expected_h));
  EXPECT_TRUE(at::equal(grad_gate_up, at::cat({grad_gate, grad_up}, -1)));
}

INSTANTIATE_TEST_SUITE_P(All, ActivationCases, ::testing::ValuesIn(all_cases()), case_name);

// An element's result does not depend on the packs in which the kernel reads it.
TEST_F(ActivationKernels, EachOperandMayBeUnaligned) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor operands = at::randn({3, 64}, at::kDouble).to(type);
    const auto results_of = [&](int64_t unaligned) {
      const auto operand = [&](int64_t idx) {
        const int64_t offset = idx == unaligned ? 1 : 0;
        const at::Tensor storage = on_device(at::zeros({65}, type));
        return storage.narrow(0, offset, 64).copy_(operands[idx]);
      };
      const auto [grad_gate, grad_up, h] =
          kernels_.gated_backward(operand(0), operand(1), operand(2), Activation::kSilu);
      return at::stack({grad_gate, grad_up, h});
    };
    const at::Tensor expected = results_of(-1);
    for (const int64_t unaligned : {0, 1, 2}) {
      EXPECT_TRUE(at::equal(results_of(unaligned), expected))
          << c10::toString(type) << ", operand " << unaligned;
    }
  }
}

TEST_F(ActivationKernels, GateUpOfMoreThan65536Elements) {
  const at::Tensor gate_up = on_device(at::randn({300, 2 * 256}));
  EXPECT_TRUE(
      at::equal(kernels_.gate_up_forward(gate_up, Activation::kRelu),
                kernels_.gated_forward(
                    gate_up.narrow(1, 0, 256), gate_up.narrow(1, 256, 256), Activation::kRelu)));
}

// Rows of 64 elements are read in packs, unless an operand is not aligned.
TEST_F(ActivationKernels, EachOperandOfGateUpMayBeUnaligned) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor gate_up = at::randn({3, 128}, at::kDouble).to(type);
    const at::Tensor grad_h = at::randn({3, 64}, at::kDouble).to(type);
    const auto results_of = [&](int64_t grad_offset, int64_t gate_up_offset) {
      const auto at_offset = [&](const at::Tensor& values, int64_t offset) {
        const at::Tensor storage = on_device(at::zeros({values.numel() + 1}, type));
        return storage.narrow(0, offset, values.numel()).view(values.sizes()).copy_(values);
      };
      const auto [grad_gate_up, h] = kernels_.gate_up_backward(
          at_offset(grad_h, grad_offset), at_offset(gate_up, gate_up_offset), Activation::kSilu);
      return at::cat({grad_gate_up, h}, -1);
    };
    const at::Tensor expected = results_of(0, 0);
    EXPECT_TRUE(at::equal(results_of(1, 0), expected)) << c10::toString(type);
    EXPECT_TRUE(at::equal(results_of(0, 1), expected)) << c10::toString(type);
  }
}

TEST_F(ActivationKernels, BackwardMatchesCentralDifferences) {
  const at::Tensor gate = on_device(at::randn({5, 37}, at::kDouble));
  const at::Tensor up = on_device(at::randn({5, 37}, at::kDouble));
  const at::Tensor ones = at::ones_like(gate);
  const double step = 1e-5;
  for (const auto activation : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh}) {
    const auto h = [&](const at::Tensor& g, const at::Tensor& u) {
      return kernels_.gated_forward(g, u, activation);
    };
    const auto [grad_gate, grad_up, h_again] = kernels_.gated_backward(ones, gate, up, activation);
    const at::Tensor gate_slope = (h(gate + step, up) - h(gate - step, up)) / (2 * step);
    const at::Tensor up_slope = (h(gate, up + step) - h(gate, up - step)) / (2 * step);
    // Truncation step^2 and rounding 1e-16 / step are both near 1e-10.
    EXPECT_LT((grad_gate - gate_slope).abs().max().item<double>(), 2e-9) << name_of(activation);
    EXPECT_LT((grad_up - up_slope).abs().max().item<double>(), 2e-9) << name_of(activation);
  }
}

// Where 1 + erf and 1 + tanh cancel in float32, the kernels keep their relative accuracy.
TEST_F(ActivationKernels, LeftTailsKeepRelativeAccuracy) {
  const at::Tensor x = at::linspace(-9, -1, 4001, at::kFloat);
  const auto points = values_of(x);
  for (const auto activation : {Activation::kSilu, Activation::kGelu}) {
    const auto values = values_of(kernels_.activation_forward(on_device(x), activation));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double expected = reference::value(activation, points[i]);
      ASSERT_NEAR(values[i], expected, 1e-6 * std::abs(expected))
          << name_of(activation) << " at " << points[i];
    }
  }
}

// The CUDA kernels approximate the normal distribution less exactly for half types.
TEST_F(ActivationKernels, LeftTailsOfHalfTypesKeepRelativeAccuracy) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const at::Tensor x = at::linspace(-9, -1, 4001, at::kFloat).to(type);
    const auto points = values_of(x);
    const double smallest = type == at::kHalf ? 3.0e-8 : 0;  // half a subnormal
    const double tolerance = relative_tolerance(type) + 5e-5;
    for (const auto activation : {Activation::kSilu, Activation::kGelu}) {
      const auto values = values_of(kernels_.activation_forward(on_device(x), activation));
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double expected = reference::value(activation, points[i]);
        ASSERT_NEAR(values[i], expected, tolerance * std::abs(expected) + smallest)
            << name_of(activation) << " in " << c10::toString(type) << " at " << points[i];
      }
    }
  }
}

void expect_same_specials(const at::Tensor& actual, const at::Tensor& expected, const char* what) {
  EXPECT_TRUE(at::allclose(actual.cpu().to(at::kDouble),
                           expected.cpu().to(at::kDouble),
                           /*rtol=*/1e-6,
                           /*atol=*/1e-7,
                           /*equal_nan=*/true))
      << what << " gave\n"
      << actual << "\nbut torch gave\n"
      << expected;
}

TEST_F(ActivationKernels, NanAndInfinityGiveTheResultsOfTorch) {
  const double inf = std::numeric_limits<double>::infinity();
  // Repeated, so that both the vector body and the remainder of the loops process every value.
  const at::Tensor specials =
      at::tensor({std::nan(""), inf, -inf, 0.0, -0.0, 1e3, -1e3, 1e25, -1e25}, at::kDouble)
          .repeat({13});
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor x = on_device(specials.to(type));
    const at::Tensor ones = at::ones_like(x);
    // The reference is torch in float64 on the CPU, because torch's vectorised float32 gelu gives
    // NaN for infinity, where torch's other versions give infinity.
    const at::Tensor x64 = x.cpu().to(at::kDouble);
    const at::Tensor ones64 = at::ones_like(x64);
    const auto check = [&](Activation activation, const at::Tensor& h, const at::Tensor& grad) {
      const std::string what = std::string(name_of(activation)) + " in " + c10::toString(type);
      expect_same_specials(kernels_.activation_forward(x, activation), h, what.c_str());
      const auto [grad_x, h_again] = kernels_.activation_backward(ones, x, activation);
      expect_same_specials(h_again, h, (what + ", h of backward").c_str());
      expect_same_specials(grad_x, grad, (what + ", gradient").c_str());
    };
    check(Activation::kSilu, at::silu(x64), at::silu_backward(ones64, x64));
    check(Activation::kGelu, at::gelu(x64), at::gelu_backward(ones64, x64));
    check(Activation::kGeluTanh, at::gelu(x64, "tanh"), at::gelu_backward(ones64, x64, "tanh"));
    check(Activation::kRelu, at::relu(x64), at::threshold_backward(ones64, x64, 0));
  }
}

// relu(1) * up is up, so every bit pattern must be preserved; NaNs may change their payload.
TEST_F(ActivationKernels, EveryHalfValueIsPreserved) {
  const at::Tensor patterns = at::arange(-32768, 32768, at::kInt).to(at::kShort);
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const at::Tensor up = patterns.view(type);
    const at::Tensor h =
        kernels_.gated_forward(on_device(at::ones_like(up)), on_device(up), Activation::kRelu)
            .cpu();
    EXPECT_TRUE(at::where(up.isnan(), h.isnan(), h.view(at::kShort) == patterns).all().item<bool>())
        << c10::toString(type);
  }
}

TEST_F(ActivationKernels, HalfResultsRoundToNearestEven) {
  const at::Tensor exponents = at::arange(-24, 17, at::kFloat).exp2().unsqueeze(1);
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const at::Tensor gate = at::rand({exponents.size(0), 999}, at::kFloat).add(1).to(type);
    const at::Tensor up = (at::randn({exponents.size(0), 999}, at::kFloat) * exponents).to(type);
    const at::Tensor h = kernels_.gated_forward(on_device(gate), on_device(up), Activation::kRelu);
    EXPECT_TRUE(at::equal(h.cpu(), (gate.to(at::kFloat) * up.to(at::kFloat)).to(type)))
        << c10::toString(type);
  }
}

void expect_error(const std::function<void()>& call, const std::string& sentence) {
  try {
    call();
    FAIL() << "expected an error: " << sentence;
  } catch (const c10::Error& error) {
    EXPECT_EQ(error.what_without_backtrace(), sentence);
  }
}

TEST_F(ActivationKernels, RejectsMismatchedOperands) {
  const at::Tensor x = on_device(at::zeros({2, 3}));
  const auto forward = [&](const at::Tensor& input) {
    kernels_.activation_forward(input, Activation::kSilu);
  };
  const auto gated = [&](const at::Tensor& up) {
    kernels_.gated_forward(x, up, Activation::kSilu);
  };
  expect_error(
      [&] {
        gated(on_device(at::zeros({2, 4})));
      },
      "gated_forward got up of shape [2, 4] but gate of shape [2, 3]; pass tensors of "
      "one shape.");
  expect_error([&] { gated(x.to(at::kDouble)); },
               "gated_forward got up of dtype Double but gate of dtype Float; convert both to one "
               "dtype.");
  expect_error([&] { forward(x.to(at::kLong)); },
               "activation_forward got x of dtype Long; convert to float32, float64, bfloat16 or "
               "float16.");
  expect_error([&] { forward(at::Tensor()); },
               "activation_forward got an undefined tensor as x; pass a tensor.");
  expect_error([&] { forward(x.to(at::kMeta)); },
               "activation_forward got x on meta in the kernel for " +
                   c10::DeviceTypeName(kernels_.device, /*lower_case=*/true) +
                   "; call the kernel of the tensor's own device.");
  expect_error(
      [&] {
        kernels_.activation_backward(on_device(at::zeros({3, 2})), x, Activation::kRelu);
      },
      "activation_backward got grad_h of shape [3, 2] but x of shape [2, 3]; pass tensors of one "
      "shape.");
  expect_error([&] { kernels_.gate_up_forward(x, Activation::kSilu); },
               "gate_up_forward got gate_up of shape [2, 3]; pass a tensor whose last dim has gate "
               "in its first half and up in its second.");
  const at::Tensor gate_up = on_device(at::zeros({2, 6}));
  expect_error([&] { kernels_.gate_up_backward(gate_up, gate_up, Activation::kSilu); },
               "gate_up_backward got grad_h of shape [2, 6] but gate_up of shape [2, 6]; pass a "
               "grad_h with half as many columns.");
}

}  // namespace
}  // namespace weft::kernels::testing
