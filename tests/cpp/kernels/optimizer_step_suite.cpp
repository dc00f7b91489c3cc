#include "optimizer_step_suite.h"

#include "low_precision.h"
#include "optimizer_step_reference.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

namespace weft::kernels::testing::optimizer {
namespace {

struct Case {
  Format format;
  std::vector<int64_t> sizes;
  StepPlace place;
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  static const char* const kWeights[] = {"Float32", "BFloat16", "Split16", "Split8"};
  static const char* const kStates[] = {"Float32", "BFloat16", "Codes"};
  const Case& c = info.param;
  std::string name = std::string(kWeights[static_cast<int>(c.format.weights)]) +
                     (c.format.has_bfloat16_grad ? "_BFloat16Grad_" : "_") +
                     kStates[static_cast<int>(c.format.states)];
  for (const int64_t size : c.sizes) name += "_" + std::to_string(size);
  return name + "_at_" + std::to_string(c.place.row) + "_" + std::to_string(c.place.column);
}

std::vector<Format> all_formats() {
  std::vector<Format> formats;
  for (const auto weights :
       {Weights::kFloat32, Weights::kBFloat16, Weights::kSplit16, Weights::kSplit8}) {
    for (const auto states : {States::kFloat32, States::kBFloat16, States::kCodes}) {
      formats.push_back({weights, false, states});
      if (weights != Weights::kFloat32) formats.push_back({weights, true, states});
    }
  }
  return formats;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const Format& format : all_formats()) {
    cases.push_back(
        {format, {3, 712}, {.step = 5, .seed = 7, .row = 2, .column = 256, .full_columns = 1000}});
    cases.push_back(
        {format, {2, 301}, {.step = 1, .seed = -1, .row = 0, .column = 0, .full_columns = 301}});
    cases.push_back(
        {format, {257}, {.step = 2, .seed = 0, .row = 0, .column = 3, .full_columns = 300}});
  }
  for (const auto states : {States::kBFloat16, States::kCodes}) {
    // Positions pass 2^32 in the middle of a block, of packs and of single elements.
    for (const int64_t before : {96, 101}) {
      cases.push_back({{Weights::kFloat32, false, states},
                       {2, 512},
                       {.step = int64_t{1} << 33,
                        .seed = int64_t{1} << 40,
                        .row = 1,
                        .column = (int64_t{1} << 31) - 512 - before,
                        .full_columns = (int64_t{1} << 31) + 512}});
    }
  }
  return cases;
}

class OptimizerStep : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kernels_.available) GTEST_SKIP() << kernels_.unavailable_reason;
    at::manual_seed(7);
  }

  // Both are made with fused multiply-adds or without, so results differ by rounding errors: floats
  // by 1e-5 of the largest, numbers in another format by one unit, for few elements.
  static void expect_equal(const at::Tensor& actual, const at::Tensor& expected) {
    const at::Tensor on_host = actual.cpu();
    ASSERT_EQ(on_host.scalar_type(), expected.scalar_type());
    if (expected.scalar_type() == at::kFloat) {
      EXPECT_TRUE(at::allclose(on_host, expected, 1e-5, 1e-6, /*equal_nan=*/true));
      return;
    }
    const bool is_bfloat16 = expected.scalar_type() == at::kBFloat16;
    const auto integers = [is_bfloat16](const at::Tensor& x) {
      return (is_bfloat16 ? x.view(at::kShort) : x).to(at::kLong);
    };
    const at::Tensor difference = (integers(on_host) - integers(expected)).abs();
    EXPECT_LE(difference.max().item<int64_t>(), 1);
    EXPECT_LE(at::count_nonzero(difference).item<int64_t>(), 2 + expected.numel() / 50);
  }

  // Compares split floats as the numbers that they make, others as they are.
  void expect_equal(const Tensors& actual, const Tensors& expected) const {
    if (expected.low_bits.has_value()) {
      const at::Tensor number = cpu::join_float(expected.parameter, *expected.low_bits);
      const double tolerance = expected.low_bits->scalar_type() == at::kChar ? 0x1p-15 : 1e-5;
      EXPECT_TRUE(at::allclose(
          kernels_.join_float(actual.parameter, *actual.low_bits).cpu(), number, tolerance, 1e-6));
    } else {
      expect_equal(actual.parameter, expected.parameter);
    }
    expect_equal(actual.first, expected.first);
    expect_equal(actual.second, expected.second);
    if (expected.first_scale) expect_equal(*actual.first_scale, *expected.first_scale);
    if (expected.second_scale) expect_equal(*actual.second_scale, *expected.second_scale);
  }

  const KernelsUnderTest kernels_ = kernels_under_test();
};

class OptimizerStepCases : public OptimizerStep, public ::testing::WithParamInterface<Case> {};

TEST_P(OptimizerStepCases, AdamMatchesTheElementFormula) {
  const Case& c = GetParam();
  for (const bool decoupled : {true, false}) {
    const Tensors expected = random_tensors(c.format, c.sizes);
    const Tensors actual = expected.copy_on(kernels_.device);
    reference_adam(expected.adam(c.place, decoupled));
    kernels_.adam_step(actual.adam(c.place, decoupled));
    expect_equal(actual, expected);
  }
}

TEST_P(OptimizerStepCases, MomentumMatchesTheElementFormula) {
  const Case& c = GetParam();
  for (const bool nesterov : {true, false}) {
    const Tensors expected = random_tensors(c.format, c.sizes);
    const Tensors actual = expected.copy_on(kernels_.device);
    reference_momentum(expected.momentum(c.place, nesterov));
    kernels_.momentum_step(actual.momentum(c.place, nesterov));
    expect_equal(actual, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerStepCases, ::testing::ValuesIn(all_cases()), case_name);

// Any range of rows, and columns from a multiple of 256 on, may be stepped alone.
TEST_F(OptimizerStep, BitsDoNotDependOnTheShard) {
  const StepPlace whole = {.step = 3, .seed = 9, .row = 4, .column = 0, .full_columns = 776};
  for (const Format& format : all_formats()) {
    const Tensors full = random_tensors(format, {4, 776}).copy_on(kernels_.device);
    Tensors shard = full.copy_on(kernels_.device);
    const auto take = [](at::Tensor& x) {
      x = x.narrow(0, 1, 2)
              .narrow(1, x.size(1) == 776 ? 256 : 1, x.size(1) == 776 ? 520 : 3)
              .clone(at::MemoryFormat::Contiguous);
    };
    const auto take_all = [&](Tensors& tensors) {
      for (auto* each : {&tensors.parameter, &tensors.grad, &tensors.first, &tensors.second})
        take(*each);
      for (auto* each : {&tensors.low_bits, &tensors.first_scale, &tensors.second_scale}) {
        if (each->has_value()) take(**each);
      }
    };
    take_all(shard);
    kernels_.adam_step(full.adam(whole, true));
    Tensors expected = full;
    take_all(expected);
    StepPlace place = whole;
    place.row = 5;
    place.column = 256;
    kernels_.adam_step(shard.adam(place, true));
    const auto actual_tensors = shard.changed();
    const auto expected_tensors = expected.changed();
    for (std::size_t i = 0; i < actual_tensors.size(); ++i) {
      EXPECT_TRUE(at::equal(actual_tensors[i], expected_tensors[i])) << i;
    }
  }
}

// One of the tensors has an address that is no multiple of 16 bytes.
TEST_F(OptimizerStep, UnalignedTensorsGiveTheSameResults) {
  const StepPlace place = {.step = 3, .seed = 9, .row = 0, .column = 0, .full_columns = 512};
  const auto unalign = [](at::Tensor& x) {
    const at::Tensor storage = at::empty({x.numel() + 1}, x.options());
    x = storage.narrow(0, 1, x.numel()).view(x.sizes()).copy_(x);
  };
  for (const Format& format : all_formats()) {
    for (int which = 0; which < 5; ++which) {
      const Tensors expected = random_tensors(format, {2, 512});
      Tensors actual = expected.copy_on(kernels_.device);
      if (which < 4) {
        at::Tensor* const tensors[] = {
            &actual.parameter, &actual.grad, &actual.first, &actual.second};
        unalign(*tensors[which]);
      } else if (actual.low_bits.has_value()) {
        unalign(*actual.low_bits);
      }
      reference_adam(expected.adam(place, true));
      kernels_.adam_step(actual.adam(place, true));
      expect_equal(actual, expected);
    }
  }
}

TEST_F(OptimizerStep, BlocksThatAreNotFiniteGetTheScaleNaN) {
  for (const auto value :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Tensors tensors = random_tensors({Weights::kFloat32, false, States::kCodes}, {2, 512});
    tensors.grad[0][300] = value;
    tensors = tensors.copy_on(kernels_.device);
    const StepPlace place = {.step = 2, .seed = 9, .row = 0, .column = 0, .full_columns = 512};
    kernels_.adam_step(tensors.adam(place, true));
    const at::Tensor is_second = at::tensor({0, 1, 0, 0}).view({2, 2}).to(at::kBool);
    EXPECT_TRUE(at::equal(tensors.first_scale->cpu().isnan(), is_second));
    EXPECT_TRUE(at::equal(tensors.second_scale->cpu().isnan(), is_second));
    EXPECT_EQ(at::count_nonzero(tensors.first[0].narrow(0, 256, 256)).item<int64_t>(), 0);
    EXPECT_EQ(at::count_nonzero(tensors.second[0].narrow(0, 256, 256)).item<int64_t>(), 0);
  }
}

at::Tensor interesting_floats() {
  at::Tensor bits = at::randint(std::numeric_limits<int32_t>::max(), {4003}, at::kLong);
  bits = at::cat(
      {bits,
       bits & ~0xFFFF,
       (bits & ~0xFFFF) + 0x8000,
       (bits & ~0xFF) + 0x80,
       at::tensor({0x7F800000L, 0x7F7FFFFFL, 0x7F7F8000L, 0x7FFFFFFFL, 0x7F800001L, 1L, 0L})});
  bits = at::cat({bits, bits - (int64_t{1} << 31)});
  return bits.to(at::kInt).view(at::kFloat);
}

TEST_F(OptimizerStep, SplitFloatsAreThoseOfTheDefinition) {
  const at::Tensor x = interesting_floats();
  for (const auto type : {at::kShort, at::kChar}) {
    const auto [high, low] = kernels_.split_float(x.to(kernels_.device), type);
    const at::Tensor expected_high = at::empty_like(x, at::kBFloat16);
    const at::Tensor expected_low = at::empty_like(x, type);
    for (int64_t i = 0; i < x.numel(); ++i) {
      const auto split = detail::split(x.const_data_ptr<float>()[i], type == at::kChar);
      static_cast<uint16_t*>(expected_high.mutable_data_ptr())[i] = split.high;
      expected_low[i] = type == at::kChar ? split.low / 256 : split.low;
    }
    EXPECT_TRUE(at::equal(high.cpu().view(at::kShort), expected_high.view(at::kShort)));
    EXPECT_TRUE(at::equal(low.cpu(), expected_low));
    const at::Tensor joined = kernels_.join_float(high, low).cpu();
    if (type == at::kShort) {
      EXPECT_TRUE(at::equal(joined.nan_to_num(0.5), x.nan_to_num(0.5)));
    }
  }
}

TEST_F(OptimizerStep, CodesAreTheNearest) {
  for (const int64_t columns : {712, 301}) {
    for (const bool is_signed : {true, false}) {
      at::Tensor x = at::randn({3, columns});
      if (!is_signed) x = x.abs();
      const auto [codes, scale] = kernels_.quantize_blocks(x.to(kernels_.device), is_signed);
      const double largest = is_signed ? 127 : 255;
      const at::Tensor scales =
          scale.cpu().repeat_interleave(256, 1).narrow(1, 0, columns).to(at::kDouble);
      const at::Tensor exact = (x.abs() / scales).sqrt() * largest;
      EXPECT_TRUE(at::equal(scale.cpu()[0][0], x[0].narrow(0, 0, 256).abs().max()));
      at::Tensor rounded = (exact + 0.5).floor();
      if (!is_signed) rounded = rounded.clamp_min(1);
      expect_equal(codes.cpu(), (rounded * x.sign()).to(codes.scalar_type()));
      const at::Tensor decoded = kernels_.dequantize_blocks(codes, scale).cpu();
      const at::Tensor roots = codes.cpu().to(at::kDouble) / largest;
      EXPECT_TRUE(at::allclose(decoded.to(at::kDouble), scales * roots * roots.abs(), 1e-6, 0));
    }
  }
}

}  // namespace
}  // namespace weft::kernels::testing::optimizer
