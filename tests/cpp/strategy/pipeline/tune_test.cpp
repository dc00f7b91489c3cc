#include "weft/strategy/pipeline/tune.h"

#include "../refusal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace weft::strategy {

namespace {

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
    return point.kind == kind && point.num_micro_batches == count;
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
  const std::vector<TunePoint> points =
      tune(stages(4, 0.25), {.batch_size = 32, .num_ranks = 4, .kinds = {ScheduleKind::kGpipe}});
  ASSERT_EQ(points.size(), 6U);
  for (const TunePoint& point : points) {
    const auto m = static_cast<double>(point.num_micro_batches);
    EXPECT_NEAR(point.makespan, (m + 3) * 3 * (0.25 + 32 / m), 1e-9);
    EXPECT_NEAR(point.bubble_fraction, 3 / (m + 3), 1e-12);
    EXPECT_EQ(point.peak_bytes, 100 + 320);
  }
  EXPECT_EQ(points.front().num_micro_batches, 16);
  EXPECT_TRUE(std::is_sorted(
      points.begin(), points.end(), [](auto& a, auto& b) { return a.makespan < b.makespan; }));
}

TEST(Tune, PrefersWhatFits) {
  const std::vector<TunePoint> points =
      tune(stages(2, 0), {.batch_size = 8, .num_ranks = 2, .memory_limit = 140});
  EXPECT_EQ(points.size(), 4U * 4U);
  EXPECT_EQ(points.front().kind, ScheduleKind::kZeroBubble);
  EXPECT_EQ(points.front().num_micro_batches, 8);
  EXPECT_TRUE(points.front().fits);
  EXPECT_FALSE(find(points, ScheduleKind::kGpipe, 8).fits);
  EXPECT_FALSE(points.back().fits);
  // As fast as GPipe with fewer bytes.
  const auto at = [&](ScheduleKind kind) { return &find(points, kind, 4) - points.data(); };
  EXPECT_LT(at(ScheduleKind::kOneForwardOneBackward), at(ScheduleKind::kGpipe));
}

TEST(Tune, CountsTheLargestMicroBatch) {
  // Seven samples in four micro-batches are 2, 2, 2 and 1.
  const std::vector<TunePoint> points = tune(
      stages(1, 0), {.batch_size = 7, .kinds = {ScheduleKind::kGpipe}, .micro_batch_counts = {4}});
  EXPECT_EQ(points[0].peak_bytes, 100 + 4 * 20);
  EXPECT_NEAR(points[0].makespan, 7 * 3, 1e-9);
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
