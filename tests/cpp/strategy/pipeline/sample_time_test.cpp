#include "weft/strategy/pipeline/sample_time.h"

#include "../error_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace weft::strategy {

namespace {

using testing::HasSubstr;

TEST(FitTime, FitsALeastSquaresLine) {
  const auto fit = [](std::vector<int64_t> sizes, std::vector<double> times) {
    return fit_time(sizes, times);
  };
  const LinearTime line = fit({1, 2, 4}, {3, 5, 9});
  EXPECT_NEAR(line.fixed, 1, 1e-12);
  EXPECT_NEAR(line.per_sample, 2, 1e-12);
  EXPECT_NEAR(line.at(8), 17, 1e-12);
  EXPECT_EQ(fit({4}, {8}).per_sample, 2);
  EXPECT_EQ(fit({4, 4}, {8, 16}).per_sample, 3);
  EXPECT_EQ(fit({1, 2}, {1, 4}).fixed, 0);  // the line would be negative at 0
  EXPECT_NEAR(fit({1, 2}, {1, 4}).per_sample, 9.0 / 5.0, 1e-12);
  EXPECT_EQ(fit({1, 2}, {4, 1}).per_sample, 0);
  EXPECT_EQ(fit({1, 2}, {4, 1}).fixed, 2.5);
  EXPECT_THAT(error_of([&] { fit({}, {}); }), HasSubstr("0 times of 0 sizes"));
  EXPECT_THAT(error_of([&] { fit({0}, {1}); }), HasSubstr("for 0 samples"));
  EXPECT_THAT(error_of([&] { fit({1}, {-1}); }), HasSubstr("a time of -1"));
}

TEST(MeasuredTime, InterpolatesLinearly) {
  const auto measured = [](std::vector<int64_t> sizes, std::vector<double> times) {
    return MeasuredTime(sizes, times);
  };
  const MeasuredTime time = measured({2, 4, 8}, {3, 4, 10});
  const std::vector<std::pair<double, double>> expected = {
      {1, 3}, {2, 3}, {3, 3.5}, {4, 4}, {6, 7}, {8, 10}, {10, 13}};
  for (const auto& [size, seconds] : expected) {
    EXPECT_NEAR(time.at(size), seconds, 1e-12) << size;
  }
  EXPECT_EQ(measured({4}, {8}).at(2), 4);
  EXPECT_EQ(measured({4, 8}, {8, 6}).at(100), 6);
  EXPECT_THAT(error_of([&] { measured({4, 4}, {1, 1}); }), HasSubstr("4 samples after 4"));
  EXPECT_THAT(error_of([&] { measured({}, {}); }), HasSubstr("0 times of 0 sizes"));
  EXPECT_THAT(error_of([&] { measured({1}, {-1}); }), HasSubstr("a time of -1"));
}

}  // namespace

}  // namespace weft::strategy
