#include "weft/strategy/pipeline/tune.h"

#include "../refusal.h"
#include "weft/strategy/pipeline/micro_batches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace weft::strategy {

namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<StageProfile> stages(size_t count, double fixed) {
  StageProfile stage;
  stage.forward = {.fixed = fixed, .per_sample = 1};
  stage.backward_input = {.fixed = fixed, .per_sample = 1};
  stage.backward_weight = {.fixed = fixed, .per_sample = 1};
  stage.activation_bytes_per_sample = 10;
  stage.parameter_bytes = 100;
  return std::vector<StageProfile>(count, stage);
}

const TunePoint& find(const std::vector<TunePoint>& points, ScheduleKind kind, int64_t count) {
  return *std::find_if(points.begin(), points.end(), [&](const TunePoint& point) {
    return point.kind == kind && point.micro_batch_sizes.size() == static_cast<size_t>(count);
  });
}

TEST(FitTime, IsTheLineOfLeastSquares) {
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
  EXPECT_THAT(refusal([&] { fit({}, {}); }), HasSubstr("0 times of 0 sizes"));
  EXPECT_THAT(refusal([&] { fit({0}, {1}); }), HasSubstr("for 0 samples"));
  EXPECT_THAT(refusal([&] { fit({1}, {-1}); }), HasSubstr("a time of -1"));
}

TEST(Tune, MoreMicroBatchesUntilTheirFixedTimeCosts) {
  const std::vector<TunePoint> points = tune(stages(4, 0.25),
                                             {.batch_size = 32,
                                              .num_ranks = 4,
                                              .kinds = {ScheduleKind::kGpipe},
                                              .micro_batch_counts = {1, 2, 4, 8, 16, 32},
                                              .tapers = false});
  ASSERT_EQ(points.size(), 6U);
  for (const TunePoint& point : points) {
    const auto m = static_cast<double>(point.micro_batch_sizes.size());
    EXPECT_NEAR(point.makespan, (m + 3) * 3 * (0.25 + 32 / m), 1e-9);
    EXPECT_NEAR(point.bubble_fraction, 3 / (m + 3), 1e-12);
    EXPECT_EQ(point.peak_bytes, 100 + 320);
  }
  EXPECT_EQ(points.front().micro_batch_sizes.size(), 16);
  EXPECT_TRUE(std::is_sorted(
      points.begin(), points.end(), [](auto& a, auto& b) { return a.makespan < b.makespan; }));
}

TEST(Tune, PrefersWhatFits) {
  const std::vector<TunePoint> points =
      tune(stages(2, 0), {.batch_size = 8, .num_ranks = 2, .memory_limit = 140, .tapers = false});
  EXPECT_EQ(points.size(), 6U * 4U);
  EXPECT_EQ(points.front().kind, ScheduleKind::kZeroBubble);
  EXPECT_EQ(points.front().micro_batch_sizes.size(), 8);
  EXPECT_TRUE(points.front().fits);
  EXPECT_FALSE(find(points, ScheduleKind::kGpipe, 8).fits);
  EXPECT_FALSE(points.back().fits);
  // As fast as GPipe with fewer bytes.
  const auto at = [&](ScheduleKind kind) { return &find(points, kind, 4) - points.data(); };
  EXPECT_LT(at(ScheduleKind::kOneForwardOneBackward), at(ScheduleKind::kGpipe));
}

TEST(Tune, TakesABatchThatDoesNotDivide) {
  // Seven samples in four micro-batches are 2, 2, 2 and 1.
  const std::vector<TunePoint> points = tune(
      stages(1, 0), {.batch_size = 7, .kinds = {ScheduleKind::kGpipe}, .micro_batch_counts = {4}});
  EXPECT_EQ(points[0].peak_bytes, 100 + 7 * 10);
  EXPECT_NEAR(points[0].makespan, 7 * 3, 1e-9);
}

TEST(Tune, SmallerMicroBatchesAtTheEnds) {
  const auto measured = stages(2, 0.25);
  const TuneOptions options{.batch_size = 32,
                            .num_ranks = 2,
                            .kinds = {ScheduleKind::kZeroBubble},
                            .micro_batch_counts = {2, 3}};
  const std::vector<TunePoint> points = tune(measured, options);
  ASSERT_EQ(points.size(), 3U);  // two are never tapered
  EXPECT_THAT(find(points, ScheduleKind::kZeroBubble, 2).micro_batch_sizes, ElementsAre(16, 16));
  const std::vector<int64_t>& sizes = points.front().micro_batch_sizes;
  ASSERT_EQ(sizes.size(), 3U);
  EXPECT_EQ(sizes[0] + sizes[1] + sizes[2], 32);
  EXPECT_LT(sizes[0], sizes[1]);
  std::vector<StageCost> costs;
  for (int stage = 0; stage < 2; ++stage) {
    for (const int64_t size : sizes) {
      const double time = measured[0].forward.at(static_cast<double>(size));
      costs.push_back({.forward = time, .backward_input = time, .backward_weight = time});
    }
  }
  const Schedule schedule =
      generate(ScheduleKind::kZeroBubble, {.num_ranks = 2, .num_micro_batches = 3});
  EXPECT_NEAR(points.front().makespan, simulate(schedule, costs).makespan, 1e-9);
  // Where a time is all fixed, sizes change nothing.
  StageProfile fixed;
  fixed.forward = fixed.backward_input = fixed.backward_weight = {.fixed = 1, .per_sample = 0};
  EXPECT_EQ(tune(std::vector(2, fixed), options).size(), 2U);
}

TEST(DealSamples, ByShares) {
  const auto deal = [](int64_t size, std::vector<double> shares) {
    return deal_samples(size, shares);
  };
  EXPECT_THAT(deal(32, {1, 2, 1}), ElementsAre(8, 16, 8));
  EXPECT_THAT(deal(7, {1, 1, 1, 1}), ElementsAre(2, 2, 2, 1));
  EXPECT_THAT(deal(10, {0.1, 0.1, 0.1}), ElementsAre(4, 3, 3));
  EXPECT_THAT(deal(3, {1, 100, 1}), ElementsAre(1, 1, 1));
  EXPECT_THAT(deal(5, {1, 100, 1}), ElementsAre(1, 3, 1));
  EXPECT_THAT(deal(6, {1, 1, 100, 100}), ElementsAre(1, 1, 2, 2));
  EXPECT_THAT(refusal([&] { deal(2, {1, 1, 1}); }), HasSubstr("3 micro-batches of a batch of 2"));
  EXPECT_THAT(refusal([&] { deal(2, {}); }), HasSubstr("0 micro-batches of a batch of 2"));
  EXPECT_THAT(refusal([&] { deal(2, {1, 0}); }), HasSubstr("share is 0"));
}

TEST(TaperedSizes, GrowFromEitherEndOrBoth) {
  const auto sizes = tapered_sizes(32, 5, 2);
  EXPECT_EQ(sizes.size(), 2U * 5U * 3U);
  for (const auto& each : sizes) {
    EXPECT_EQ(std::accumulate(each.begin(), each.end(), int64_t{0}), 32);
    EXPECT_LE(each.front(), each[2] + 1);  // by rounding
    EXPECT_LE(each.back(), each[2] + 1);
  }
  EXPECT_THAT(sizes, testing::Contains(ElementsAre(4, 8, 8, 8, 4)));
  EXPECT_THAT(sizes, testing::Contains(ElementsAre(4, 7, 7, 7, 7)));  // the first alone, by a half
  EXPECT_TRUE(tapered_sizes(32, 2, 2).empty());
}

TEST(Tune, SeveralStagesARank) {
  const std::vector<TunePoint> points =
      tune(stages(4, 0), {.batch_size = 8, .num_ranks = 2, .micro_batch_counts = {4}});
  ASSERT_EQ(points.size(), 3U);
  EXPECT_NEAR(find(points, ScheduleKind::kInterleaved, 4).bubble_fraction, 1.0 / 9.0, 1e-12);
}

TEST(Tune, RefusesNumbersOutOfRange) {
  EXPECT_THAT(refusal([] { tune(stages(3, 0), {.num_ranks = 2}); }),
              HasSubstr("3 stages on 2 ranks"));
  EXPECT_THAT(refusal([] { tune({}, {}); }), HasSubstr("0 stages on 1 ranks"));
  EXPECT_THAT(refusal([] { tune(stages(1, 0), {.batch_size = 0}); }), HasSubstr("batch_size is 0"));
  EXPECT_THAT(refusal([] { tune(stages(1, 0), {.batch_size = 2, .micro_batch_counts = {4}}); }),
              HasSubstr("4 micro-batches of a batch of 2"));
}

}  // namespace

}  // namespace weft::strategy
