// Compares the reductions of every supported instruction set with references in double precision.
#include "reduce.h"

#include <weft/kernels/half_types.h>

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

namespace weft::collectives {
namespace {

using kernels::cpu::BFloat16;
using kernels::cpu::Float16;

template <typename T>
T element(int value) {
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) {
    T out{};
    kernels::cpu::store(static_cast<float>(value), out);
    return out;
  } else {
    return static_cast<T>(value);
  }
}

template <typename T>
double number(T value) {
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) {
    return kernels::cpu::load(value);
  } else {
    return static_cast<double>(value);
  }
}

double expected(ReduceOp op, const std::vector<int>& values) {
  double result = values.front();
  for (size_t k = 1; k < values.size(); ++k) {
    const int value = values[k];
    const auto bits = static_cast<int>(result);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        result += value;
        break;
      case ReduceOp::kProduct:
        result *= value;
        break;
      case ReduceOp::kMin:
        result = std::min<double>(result, value);
        break;
      case ReduceOp::kMax:
        result = std::max<double>(result, value);
        break;
      case ReduceOp::kBand:
        result = bits & value;
        break;
      case ReduceOp::kBor:
        result = bits | value;
        break;
      case ReduceOp::kBxor:
        result = bits ^ value;
        break;
      case ReduceOp::kNone:
        break;
    }
  }
  return result;
}

constexpr std::array kOps{ReduceOp::kSum,
                          ReduceOp::kAvg,
                          ReduceOp::kProduct,
                          ReduceOp::kMin,
                          ReduceOp::kMax,
                          ReduceOp::kBand,
                          ReduceOp::kBor,
                          ReduceOp::kBxor};

// Returns the loops of each instruction set, without and with streaming stores.
std::vector<std::pair<detail::ReduceLoops, bool>> every_variant() {
  std::vector<std::pair<detail::ReduceLoops, bool>> variants;
  for (const auto loops : detail::supported_reduce_loops()) {
    variants.emplace_back(loops, false);
    variants.emplace_back(loops, true);
  }
  return variants;
}

// Values of 0 to 4: products of three and sums fit every type, and are exact in half types.
template <typename T>
void check(DType dtype) {
  std::mt19937 random(17);
  for (const ReduceOp op : kOps) {
    if (!can_reduce(op, dtype)) continue;
    for (const size_t size : {size_t{0}, size_t{1}, size_t{31}, size_t{1024}, size_t{1025}}) {
      for (const size_t num_sources : {size_t{1}, size_t{2}, size_t{3}}) {
        std::vector<std::vector<int>> values(size, std::vector<int>(num_sources));
        std::vector<std::vector<T>> sources(num_sources, std::vector<T>(size));
        for (size_t i = 0; i < size; ++i) {
          for (size_t k = 0; k < num_sources; ++k) {
            values[i][k] = static_cast<int>(random() % 5);
            sources[k][i] = element<T>(values[i][k]);
          }
        }
        for (const auto& [loops, streams] : every_variant()) {
          auto copies = sources;
          std::vector<const std::byte*> data;
          for (auto& source : copies) data.push_back(reinterpret_cast<std::byte*>(source.data()));
          // The result overwrites the last source, as in an in-place collective.
          auto& out = copies.back();
          loops({op,
                 dtype,
                 reinterpret_cast<std::byte*>(out.data()),
                 data.data(),
                 data.size(),
                 static_cast<int64_t>(size),
                 static_cast<int64_t>(data.size()),
                 streams});
          for (size_t i = 0; i < size; ++i) {
            double wanted = expected(op, values[i]);
            if (op == ReduceOp::kAvg) {
              wanted /= static_cast<double>(num_sources);
              if (dtype < DType::kFloat16) wanted = std::trunc(wanted);
            }
            const double tolerance = dtype == DType::kBFloat16  ? 0.01
                                     : dtype == DType::kFloat16 ? 0.002
                                                                : 1e-6;
            ASSERT_NEAR(number(out[i]), wanted, tolerance * std::max(1.0, wanted))
                << name_of(op) << ' ' << name_of(dtype) << " element " << i;
          }
        }
      }
    }
  }
}

TEST(Reduce, EveryTypeAndOperationMatchTheReference) {
  check<uint8_t>(DType::kUInt8);
  check<int8_t>(DType::kInt8);
  check<uint16_t>(DType::kUInt16);
  check<int16_t>(DType::kInt16);
  check<uint32_t>(DType::kUInt32);
  check<int32_t>(DType::kInt32);
  check<uint64_t>(DType::kUInt64);
  check<int64_t>(DType::kInt64);
  check<Float16>(DType::kFloat16);
  check<BFloat16>(DType::kBFloat16);
  check<float>(DType::kFloat32);
  check<double>(DType::kFloat64);
}

// Every number of sources, and sizes around full blocks and cache lines, with and without streaming
// stores and alignment to cache lines.
TEST(Reduce, EveryLengthIsExactAndStaysInBounds) {
  for (const detail::ReduceLoops loops : detail::supported_reduce_loops()) {
    for (const size_t num_sources : {1, 2, 3, 5, 8}) {
      for (const int64_t num_elements : {0, 1, 15, 63, 64, 65, 127, 128, 129, 300, 1000}) {
        for (const size_t offset : {0, 1, 15}) {  // in elements
          const auto size = static_cast<size_t>(num_elements);
          std::vector<std::vector<float>> values(num_sources, std::vector<float>(size + offset));
          std::vector<const std::byte*> sources;
          std::vector<float> expected(size, 0.F);
          for (size_t k = 0; k < num_sources; ++k) {
            for (size_t i = 0; i < size; ++i) {
              values[k][offset + i] = static_cast<float>((k + 1) * (i % 97 + 1));
              expected[i] += values[k][offset + i];
            }
            sources.push_back(reinterpret_cast<const std::byte*>(values[k].data() + offset));
          }
          for (const bool streams : {false, true}) {
            std::vector<float> out(size + offset + 1, -1.F);
            loops({ReduceOp::kSum,
                   DType::kFloat32,
                   reinterpret_cast<std::byte*>(out.data() + offset),
                   sources.data(),
                   num_sources,
                   num_elements,
                   1,
                   streams});
            const auto first = out.begin() + static_cast<int64_t>(offset);
            EXPECT_TRUE(std::equal(expected.begin(), expected.end(), first));
            EXPECT_EQ(out.back(), -1.F) << "past the end";
            EXPECT_TRUE(std::all_of(out.begin(), first, [](float x) { return x == -1.F; }));
          }
        }
      }
    }
  }
}

// Bitwise (((a + b) + c) + d) with every instruction set, so that all ranks get the same result.
TEST(Reduce, AddsInTheOrderOfTheSources) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> uniform(-1e6F, 1e6F);
  constexpr size_t kSize = 3001;
  std::vector<std::vector<float>> sources(4, std::vector<float>(kSize));
  std::vector<const std::byte*> data;
  for (auto& source : sources) {
    for (float& value : source) value = uniform(random);
    data.push_back(reinterpret_cast<std::byte*>(source.data()));
  }
  for (const auto loops : detail::supported_reduce_loops()) {
    std::vector<float> out(kSize);
    loops({ReduceOp::kSum,
           DType::kFloat32,
           reinterpret_cast<std::byte*>(out.data()),
           data.data(),
           data.size(),
           kSize});
    for (size_t i = 0; i < kSize; ++i) {
      const float wanted = ((sources[0][i] + sources[1][i]) + sources[2][i]) + sources[3][i];
      ASSERT_EQ(std::memcmp(&out[i], &wanted, sizeof wanted), 0) << i;
    }
  }
}

// Results at addresses that are not aligned even to their own type.
TEST(Reduce, ResultsMayHaveOddAddresses) {
  constexpr size_t kSize = 1000;
  std::vector<BFloat16> ones(kSize, BFloat16{0x3F80});
  const auto* const source = reinterpret_cast<const std::byte*>(ones.data());
  const std::vector<const std::byte*> sources(3, source);
  for (const auto& [loops, streams] : every_variant()) {
    std::vector<std::byte> out(2 * kSize + 2);
    loops({ReduceOp::kSum, DType::kBFloat16, out.data() + 1, sources.data(), 3, kSize, 1, streams});
    for (size_t i = 0; i < kSize; ++i) {
      BFloat16 element{};
      std::memcpy(&element, out.data() + 1 + 2 * i, 2);
      ASSERT_EQ(element.bits, 0x4040) << i;  // 3
    }
    EXPECT_EQ(out.front(), std::byte{0});
    EXPECT_EQ(out.back(), std::byte{0});
  }
}

// In place, as in an all-reduce.
TEST(Reduce, TheResultMayBeASource) {
  constexpr size_t kSize = 1001;
  for (const auto loops : detail::supported_reduce_loops()) {
    std::vector<float> own(kSize, 2.F);
    const std::vector<float> other(kSize, 3.F);
    const std::vector<const std::byte*> sources = {reinterpret_cast<const std::byte*>(other.data()),
                                                   reinterpret_cast<const std::byte*>(own.data())};
    loops({ReduceOp::kSum,
           DType::kFloat32,
           reinterpret_cast<std::byte*>(own.data()),
           sources.data(),
           2,
           kSize});
    EXPECT_EQ(own, std::vector<float>(kSize, 5.F));
  }
}

TEST(Reduce, HalfTypesAccumulateInFloat) {
  // 256 + 1 is not a bfloat16, 256 + 1 + 1 is: rounding after each addition would give 256.
  std::array<BFloat16, 3> values{
      element<BFloat16>(256), element<BFloat16>(1), element<BFloat16>(1)};
  std::vector<const std::byte*> data;
  for (auto& value : values) data.push_back(reinterpret_cast<std::byte*>(&value));
  BFloat16 out{};
  reduce(ReduceOp::kSum, DType::kBFloat16, reinterpret_cast<std::byte*>(&out), data, 1);
  EXPECT_EQ(number(out), 258.0);
}

TEST(Reduce, IntegersWrap) {
  std::array<int32_t, 2> values{std::numeric_limits<int32_t>::max(), 1};
  const std::vector<const std::byte*> data{reinterpret_cast<std::byte*>(&values[0]),
                                           reinterpret_cast<std::byte*>(&values[1])};
  int32_t out = 0;
  reduce(ReduceOp::kSum, DType::kInt32, reinterpret_cast<std::byte*>(&out), data, 1);
  EXPECT_EQ(out, std::numeric_limits<int32_t>::min());
}

TEST(Reduce, NaNPropagatesFromEitherSide) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const bool nan_first : {true, false}) {
    std::array<float, 2> values{nan_first ? nan : 1.F, nan_first ? 1.F : nan};
    const std::vector<const std::byte*> data{reinterpret_cast<std::byte*>(&values[0]),
                                             reinterpret_cast<std::byte*>(&values[1])};
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kSum}) {
      float out = 0;
      reduce(op, DType::kFloat32, reinterpret_cast<std::byte*>(&out), data, 1);
      EXPECT_TRUE(std::isnan(out)) << name_of(op);
    }
  }
}

TEST(Reduce, BoolsAreReducedLogically) {
  std::array<uint8_t, 2> values{1, 0};
  const std::vector<const std::byte*> data{reinterpret_cast<std::byte*>(&values[0]),
                                           reinterpret_cast<std::byte*>(&values[1])};
  const auto result = [&](ReduceOp op) {
    uint8_t out = 9;
    reduce(op, DType::kBool, reinterpret_cast<std::byte*>(&out), data, 1);
    return out;
  };
  EXPECT_EQ(result(ReduceOp::kSum), 1);
  EXPECT_EQ(result(ReduceOp::kMax), 1);
  EXPECT_EQ(result(ReduceOp::kProduct), 0);
  EXPECT_EQ(result(ReduceOp::kMin), 0);
  EXPECT_EQ(result(ReduceOp::kBxor), 1);
}

TEST(Reduce, UndefinedReductionsAreNotSupported) {
  EXPECT_FALSE(can_reduce(ReduceOp::kBand, DType::kFloat32));
  EXPECT_FALSE(can_reduce(ReduceOp::kAvg, DType::kBool));
  EXPECT_FALSE(can_reduce(ReduceOp::kSum, DType::kFloat8E4M3FN));
  EXPECT_FALSE(can_reduce(ReduceOp::kProduct, DType::kComplex64));
  EXPECT_TRUE(can_reduce(ReduceOp::kAvg, DType::kComplex128));
  EXPECT_FALSE(can_reduce(ReduceOp::kNone, DType::kInt32));
  EXPECT_TRUE(can_reduce(ReduceOp::kBor, DType::kBool));
}

}  // namespace
}  // namespace weft::collectives
