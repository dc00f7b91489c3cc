#include "dropout_suite.h"

#include "philox.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace weft::kernels::testing::dropout {
namespace {

constexpr uint64_t kSeed = 0x0123456789ABCDEFULL;

struct Case {
  at::ScalarType type;
  int64_t outer;
  DropoutPlace place;
  bool is_offset;  // the storage begins one element earlier: vector loads are not aligned
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return std::string(c10::toString(c.type)) + "_" + std::to_string(c.outer) + "_" +
         std::to_string(c.place.begin) + "_" + std::to_string(c.place.size) + "_of_" +
         std::to_string(c.place.full_size) + "_" + std::to_string(c.place.inner) +
         (c.is_offset ? "_offset" : "");
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const bool is_offset : {false, true}) {
      for (const DropoutPlace place : {DropoutPlace{1, 1, 0, 1},
                                       DropoutPlace{1, 7, 0, 7},
                                       DropoutPlace{1, 7, 3, 21},
                                       DropoutPlace{8, 16, 16, 64},
                                       DropoutPlace{5, 33, 1, 100},
                                       // Packs of 4 and of 8 elements cross the end of a run.
                                       DropoutPlace{2, 3, 1, 9},
                                       DropoutPlace{1, 12, 5, 30},
                                       DropoutPlace{1, 4096, 4096, 8192},
                                       // Positions beyond 2^32 and 2^33.
                                       DropoutPlace{4096, 3, 2097151, 4194304}}) {
        for (const int64_t outer : {1, 3, 9}) cases.push_back({type, outer, place, is_offset});
      }
    }
  }
  return cases;
}

class DropoutKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kernels_.available) GTEST_SKIP() << kernels_.unavailable_reason;
    at::manual_seed(7);
  }

  const KernelsUnderTest kernels_ = kernels_under_test();
};

class DropoutCases : public DropoutKernels, public ::testing::WithParamInterface<Case> {
 protected:
  at::Tensor random() const {
    const Case& c = GetParam();
    const int64_t size = c.outer * c.place.size * c.place.inner;
    const at::Tensor values = at::randn({size + 1}, at::kDouble).to(c.type).to(kernels_.device);
    return values.narrow(0, c.is_offset ? 1 : 0, size);
  }
};

// Each element as dropout_job.h defines it, from Philox on the host.
TEST_P(DropoutCases, MatchTheDefinition) {
  const Case& c = GetParam();
  const double p = 0.3;
  const at::Tensor x = random();
  const at::Tensor y = kernels_.dropout(x, p, kSeed, c.place).cpu();
  const auto compute_type = c.type == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor scaled =
      (x.cpu().to(compute_type) *
       at::scalar_tensor(1 / (1 - p), at::TensorOptions().dtype(compute_type)))
          .to(c.type);
  const int64_t run_size = c.place.size * c.place.inner;
  at::Tensor keeps = at::empty({x.numel()}, at::kBool);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const int64_t position = i / run_size * (c.place.full_size * c.place.inner) +
                             c.place.begin * c.place.inner + i % run_size;
    const auto bits = detail::philox(static_cast<uint64_t>(position / 4), kSeed);
    keeps.mutable_data_ptr<bool>()[i] =
        bits.words[position % 4] >= static_cast<uint64_t>(p * 0x1p32);
  }
  EXPECT_TRUE(at::equal(y, at::where(keeps, scaled, at::zeros_like(scaled))));
}

TEST_P(DropoutCases, DropNothingIfPIs0AndEverythingIfPIs1) {
  const at::Tensor x = random();
  EXPECT_TRUE(at::equal(kernels_.dropout(x, 0, kSeed, GetParam().place), x));
  EXPECT_TRUE(at::equal(kernels_.dropout(x, 1, kSeed, GetParam().place), at::zeros_like(x)));
}

INSTANTIATE_TEST_SUITE_P(All, DropoutCases, ::testing::ValuesIn(all_cases()), case_name);

struct KnownWords {
  uint64_t counter;
  uint64_t seed;
  std::vector<int64_t> words;
};

// The words of counter 0 are a known answer of Random123, the library of Philox's authors; the
// others are from tests/ops/philox.py. An element is dropped exactly if its word is below p * 2^32.
TEST_F(DropoutKernels, PhiloxGivesKnownAnswers) {
  const KnownWords known[] = {
      {0, 0, {0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}},
      {0x0123456789ABCDEF, 0xFEDCBA9876543210, {0x822ED603, 0x19774975, 0x4C78EBA5, 0xDC0BA28A}}};
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor ones = at::ones({4}, at::TensorOptions(type).device(kernels_.device));
    for (const auto& [counter, seed, words] : known) {
      const auto begin = static_cast<int64_t>(4 * counter);
      for (std::size_t i = 0; i < words.size(); ++i) {
        const auto keeps_at = [&](int64_t threshold) {
          const DropoutPlace place = {
              .inner = 1, .size = 4, .begin = begin, .full_size = begin + 4};
          const at::Tensor y =
              kernels_.dropout(ones, static_cast<double>(threshold) * 0x1p-32, seed, place);
          return y[static_cast<int64_t>(i)].item<double>() != 0;
        };
        EXPECT_TRUE(keeps_at(words[i])) << "word " << i << " of counter " << counter;
        EXPECT_FALSE(keeps_at(words[i] + 1)) << "word " << i << " of counter " << counter;
      }
    }
  }
}

}  // namespace
}  // namespace weft::kernels::testing::dropout
