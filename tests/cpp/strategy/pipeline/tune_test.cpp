#include "weft/strategy/pipeline/tune.h"

#include "../error_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace weft::strategy {

namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<StageProfile> stages(size_t count, double fixed) {
  StageProfile stage;
  stage.forward = stage.backward_input = stage.backward_weight =
      LinearTime{.fixed = fixed, .per_sample = 1};
  stage.activation_bytes_per_sample = 10;
  stage.parameter_bytes = 100;
  return std::vector<StageProfile>(count, stage);
}

const TunePoint& find(const std::vector<TunePoint>& points, ScheduleKind kind, int64_t count) {
  return *std::find_if(points.begin(), points.end(), [&](const TunePoint& point) {
    return point.kind == kind && point.micro_batch_sizes.size() == static_cast<size_t>(count);
  });
}

TEST(Tune, BalancesTheBubbleAndTheFixedTimePerMicroBatch) {
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

TEST(Tune, PrefersPointsThatFit) {
  const std::vector<TunePoint> points =
      tune(stages(2, 0), {.batch_size = 8, .num_ranks = 2, .memory_limit = 140, .tapers = false});
  EXPECT_EQ(points.size(), 6U * 4U);
  EXPECT_EQ(points.front().kind, ScheduleKind::kZeroBubble);
  EXPECT_EQ(points.front().micro_batch_sizes.size(), 8);
  EXPECT_TRUE(points.front().fits);
  EXPECT_FALSE(find(points, ScheduleKind::kGpipe, 8).fits);
  EXPECT_FALSE(points.back().fits);
  // 1F1B is as fast as GPipe and needs fewer bytes.
  const auto at = [&](ScheduleKind kind) { return &find(points, kind, 4) - points.data(); };
  EXPECT_LT(at(ScheduleKind::kOneForwardOneBackward), at(ScheduleKind::kGpipe));
}

TEST(Tune, AcceptsABatchSizeThatIsNotDivisible) {
  // Seven samples are split into micro-batches of 2, 2, 2 and 1.
  const std::vector<TunePoint> points = tune(
      stages(1, 0), {.batch_size = 7, .kinds = {ScheduleKind::kGpipe}, .micro_batch_counts = {4}});
  EXPECT_EQ(points[0].peak_bytes, 100 + 7 * 10);
  EXPECT_NEAR(points[0].makespan, 7 * 3, 1e-9);
}

TEST(Tune, TapersMicroBatchesWhereThatIsFaster) {
  const auto measured = stages(2, 0.25);
  const TuneOptions options{.batch_size = 32,
                            .num_ranks = 2,
                            .kinds = {ScheduleKind::kZeroBubble},
                            .micro_batch_counts = {2, 3}};
  const std::vector<TunePoint> points = tune(measured, options);
  ASSERT_EQ(points.size(), 3U);  // two micro-batches are never tapered
  EXPECT_THAT(find(points, ScheduleKind::kZeroBubble, 2).micro_batch_sizes, ElementsAre(16, 16));
  const std::vector<int64_t>& sizes = points.front().micro_batch_sizes;
  ASSERT_EQ(sizes.size(), 3U);
  EXPECT_EQ(sizes[0] + sizes[1] + sizes[2], 32);
  EXPECT_LT(sizes[0], sizes[1]);
  std::vector<StageCost> costs;
  for (int stage = 0; stage < 2; ++stage) {
    for (const int64_t size : sizes) {
      const double time = 0.25 + static_cast<double>(size);
      costs.push_back({.forward = time, .backward_input = time, .backward_weight = time});
    }
  }
  const Schedule schedule =
      generate(ScheduleKind::kZeroBubble, {.num_ranks = 2, .num_micro_batches = 3});
  EXPECT_NEAR(points.front().makespan, simulate(schedule, costs).makespan, 1e-9);
  // If all times are fixed, sizes change nothing.
  StageProfile fixed;
  fixed.forward = fixed.backward_input = fixed.backward_weight = LinearTime{.fixed = 1.0 / 3};
  EXPECT_EQ(tune(std::vector(2, fixed), options).size(), 2U);
  // Sizes change times only by rounding if one micro-batch runs at a time, or on one rank.
  StageProfile odd;
  odd.forward = LinearTime{.fixed = 0.003, .per_sample = 0.0017};
  odd.backward_input = odd.backward_weight = odd.forward;
  EXPECT_EQ(tune(std::vector(1, odd), {.batch_size = 32}).size(), 10U * 4U);
  const TuneOptions without{.batch_size = 32, .num_ranks = 4, .tapers = false};
  const std::vector<TunePoint> even = tune(std::vector(4, odd), without);
  size_t num_tapered = 0;
  for (const TunePoint& point : tune(std::vector(4, odd), {.batch_size = 32, .num_ranks = 4})) {
    const TunePoint& other =
        find(even, point.kind, static_cast<int64_t>(point.micro_batch_sizes.size()));
    if (point.micro_batch_sizes != other.micro_batch_sizes) {
      ++num_tapered;
      EXPECT_NE(point.kind, ScheduleKind::kNaive);
      EXPECT_LT(point.makespan, other.makespan * (1 - 1e-7));
    }
  }
  EXPECT_GT(num_tapered, 0U);
}

TEST(Tune, DoesNotGoBelowTheSmallestMeasuredSize) {
  const std::vector<int64_t> sizes = {8, 16, 32};
  const std::vector<double> times = {8, 14, 32};  // 16 samples fit the caches best
  StageProfile stage;
  stage.forward = stage.backward_input = stage.backward_weight = MeasuredTime(sizes, times);
  const std::vector<TunePoint> points =
      tune(std::vector(2, stage), {.batch_size = 32, .num_ranks = 2, .tapers = true});
  EXPECT_GE(*std::min_element(points.front().micro_batch_sizes.begin(),
                              points.front().micro_batch_sizes.end()),
            8);
}

TEST(Tune, SeveralStagesPerRankMayBeInterleaved) {
  const std::vector<TunePoint> points =
      tune(stages(4, 0), {.batch_size = 8, .num_ranks = 2, .micro_batch_counts = {4}});
  ASSERT_EQ(points.size(), 7U);
  EXPECT_NEAR(find(points, ScheduleKind::kInterleaved, 4).bubble_fraction, 1.0 / 9.0, 1e-12);
  EXPECT_NEAR(find(points, ScheduleKind::kZeroBubbleV, 4).bubble_fraction, 1.0 / 25.0, 1e-12);
  const std::vector<TunePoint> three =
      tune(stages(6, 0), {.batch_size = 8, .num_ranks = 2, .micro_batch_counts = {4}});
  EXPECT_EQ(three.size(), 3U);
}

TEST(Tune, RejectsNumbersOutOfRange) {
  EXPECT_THAT(error_of([] { tune(stages(3, 0), {.num_ranks = 2}); }),
              HasSubstr("3 stages on 2 ranks"));
  EXPECT_THAT(error_of([] { tune({}, {}); }), HasSubstr("0 stages on 1 ranks"));
  EXPECT_THAT(error_of([] { tune(stages(1, 0), {.batch_size = 0}); }),
              HasSubstr("batch_size is 0"));
  EXPECT_THAT(error_of([] { tune(stages(1, 0), {.batch_size = 2, .micro_batch_counts = {4}}); }),
              HasSubstr("tune: 4 micro-batches of a batch of 2"));
  constexpr int64_t kMany = int64_t{1} << 60;  // rejected before anything of that size is allocated
  EXPECT_THAT(error_of([] { tune(stages(1, 0), {.micro_batch_counts = {kMany}}); }),
              HasSubstr("micro-batches of a batch of 1"));
}

}  // namespace

}  // namespace weft::strategy
