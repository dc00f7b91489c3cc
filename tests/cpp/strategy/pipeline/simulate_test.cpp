#include "weft/strategy/pipeline/simulate.h"

#include "../error_of.h"
#include "schedules.h"
#include "weft/strategy/pipeline/passes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace weft::strategy {

namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr double kTolerance = 1e-12;

Simulation run(const Schedule& schedule, const StageCost& cost = {}) {
  return simulate(schedule, std::vector<StageCost>{cost});
}

TEST(Simulate, EqualStagesFollowTheFormulas) {
  for (int64_t p = 1; p <= 8; ++p) {
    for (int64_t m = 1; m <= 20; ++m) {
      const auto bubble = static_cast<double>(p - 1) / static_cast<double>(m + p - 1);
      const Simulation gpipe = run(make(ScheduleKind::kGpipe, p, m));
      EXPECT_NEAR(gpipe.bubble_fraction, bubble, kTolerance);
      EXPECT_THAT(gpipe.in_flight, Each(m));
      const Simulation one = run(make(ScheduleKind::kOneForwardOneBackward, p, m));
      EXPECT_NEAR(one.bubble_fraction, bubble, kTolerance);
      for (int64_t stage = 0; stage < p; ++stage) {
        EXPECT_EQ(one.in_flight[static_cast<size_t>(stage)], std::min(p - stage, m));
      }
      const Simulation naive = run(make(ScheduleKind::kNaive, p, m));
      EXPECT_NEAR(naive.bubble_fraction, 1 - 1.0 / static_cast<double>(p), kTolerance);
      EXPECT_THAT(naive.in_flight, Each(1));
    }
  }
}

// Computed by hand: stage 0 waits for the gradient of the larger micro-batch from 7 to 10, and for
// the gradient of the last one until 14.
TEST(Simulate, MicroBatchesMayHaveDifferentSizes) {
  std::vector<StageCost> costs;
  for (int stage = 0; stage < 2; ++stage) {
    for (const int size : {1, 2, 1}) {
      const auto time = static_cast<double>(size);
      costs.push_back({.forward = time,
                       .backward_input = time,
                       .backward_weight = time,
                       .activation_bytes = 10 * size,
                       .parameter_bytes = 5});
    }
  }
  const Simulation result = simulate(make(ScheduleKind::kOneForwardOneBackward, 2, 3), costs);
  EXPECT_EQ(result.makespan, 16);
  EXPECT_EQ(result.ranks[0][4].start, 10);  // the backward of the larger micro-batch
  EXPECT_THAT(result.peak_bytes, ElementsAre(35, 25));
  EXPECT_NEAR(result.bubble_fraction, 1 - 24.0 / 32, kTolerance);
  for (StageCost& cost : costs) {
    cost.transfer = cost.forward / 2;
  }
  EXPECT_EQ(simulate(make(ScheduleKind::kNaive, 2, 3), costs).makespan, 24 + 4);
}

TEST(Simulate, InterleavedStagesFollowTheFormula) {
  for (int64_t p = 2; p <= 6; ++p) {
    for (int64_t v = 2; v <= 4; ++v) {
      for (int64_t rounds = 1; rounds <= 4; ++rounds) {
        const int64_t m = p * rounds;
        const auto bubble = static_cast<double>(p - 1) / static_cast<double>(v * m + p - 1);
        EXPECT_NEAR(
            run(make(ScheduleKind::kInterleaved, p, m, v)).bubble_fraction, bubble, kTolerance);
        EXPECT_NEAR(
            run(make(ScheduleKind::kLoopedBfs, p, m, v)).bubble_fraction, bubble, kTolerance);
      }
    }
  }
}

// On p ranks 1F1B is idle for p - 1 times (forward + backward); splitting the backward into an
// input half and a weight half reduces that to p - 1 times (forward + input half - weight half).
TEST(Simulate, ZeroBubbleFollowsTheFormula) {
  for (int64_t p = 1; p <= 8; ++p) {
    for (int64_t m = p; m <= 2 * p + 3; ++m) {
      const StageCost cost{.forward = 5, .backward_input = 6, .backward_weight = 4};
      const Simulation result = run(make(ScheduleKind::kZeroBubble, p, m), cost);
      EXPECT_NEAR(result.makespan, static_cast<double>(15 * m + (p - 1) * (5 + 6 - 4)), 1e-9)
          << p << " " << m;
      EXPECT_THAT(result.in_flight, Each(testing::Le(std::min(p, m))));
    }
  }
}

TEST(Simulate, TimesFollowTheSlowestStage) {
  const std::vector<StageCost> costs = {
      {.forward = 1, .backward_input = 1, .backward_weight = 1, .transfer = 0.5},
      {.forward = 3, .backward_input = 3, .backward_weight = 3, .transfer = 100}};
  const Simulation result = simulate(make(ScheduleKind::kGpipe, 2, 2), costs);
  EXPECT_EQ(result.ranks[1],
            (std::vector<Span>{{{1, 0, ActionKind::kForward}, 1.5, 4.5},
                               {{1, 1, ActionKind::kForward}, 4.5, 7.5},
                               {{1, 0, ActionKind::kBackward}, 7.5, 13.5},
                               {{1, 1, ActionKind::kBackward}, 13.5, 19.5}}));
  EXPECT_EQ(result.ranks[0].back(), (Span{{0, 1, ActionKind::kBackward}, 20, 22}));
  EXPECT_EQ(result.makespan, 22);
  EXPECT_NEAR(result.bubble_fraction, 1 - 24.0 / 44.0, kTolerance);
}

TEST(Simulate, CommunicationChangesNoTimes) {
  const std::vector<StageCost> costs = {{.forward = 1, .transfer = 0.25},
                                        {.forward = 2, .transfer = 0.5},
                                        {.forward = 1.5, .transfer = 0.125},
                                        {.forward = 0.5, .transfer = 1},
                                        {.forward = 1, .transfer = 0.75},
                                        {.forward = 2}};
  for (const ScheduleKind kind : all_schedule_kinds()) {
    const int64_t v = default_stages_per_rank(kind);
    const Schedule schedule = make(kind, 6 / v, 5, v);
    const Simulation plain = simulate(schedule, costs);
    const Simulation lowered = simulate(add_communication(schedule), costs);
    EXPECT_EQ(plain.ranks, lowered.ranks);
    EXPECT_EQ(plain.in_flight, lowered.in_flight);
  }
}

TEST(Simulate, PeakBytesCountActivationsInFlight) {
  const std::vector<StageCost> costs = {{.activation_bytes = 10, .parameter_bytes = 1000},
                                        {.activation_bytes = 20, .parameter_bytes = 2000},
                                        {.activation_bytes = 30, .parameter_bytes = 3000},
                                        {.activation_bytes = 40, .parameter_bytes = 4000}};
  const Simulation looped = simulate(make(ScheduleKind::kLoopedBfs, 2, 3, 2), costs);
  EXPECT_THAT(looped.peak_bytes, ElementsAre(4000 + 3 * 40, 6000 + 3 * 60));
  const Simulation forwards =
      simulate(forward_only(make(ScheduleKind::kLoopedBfs, 2, 3, 2)), costs);
  EXPECT_THAT(forwards.peak_bytes, ElementsAre(4000 + 30, 6000 + 40));
  EXPECT_THAT(forwards.in_flight, Each(1));
}

TEST(Simulate, RejectsMismatchedCosts) {
  const Schedule schedule = make(ScheduleKind::kGpipe, 3, 1);
  const auto simulate_error = [&](const std::vector<StageCost>& costs) {
    return error_of([&] { simulate(schedule, costs); });
  };
  EXPECT_EQ(simulate_error({{}, {}}),
            "simulate: 2 costs for 3 stages and 1 micro-batches; pass one for all, one for each "
            "stage, or "
            "one for each stage and micro-batch");
  EXPECT_THAT(simulate_error({{.forward = -1}}), HasSubstr("a time of stage 0 is -1"));
  EXPECT_THAT(simulate_error({{.transfer = std::numeric_limits<double>::quiet_NaN()}}),
              HasSubstr("a time of stage 0 is nan"));
  EXPECT_THAT(simulate_error({{.activation_bytes = -1}}),
              HasSubstr("bytes of stage 0 are negative"));
  EXPECT_THAT(error_of([] { run(Schedule()); }), HasSubstr("has no actions"));
  EXPECT_THAT(simulate_error({{.activation_bytes = int64_t{1} << 61}}),
              HasSubstr("add up to more than can be counted"));
}

TEST(Simulate, LargeSchedulesFollowTheFormula) {
  const Schedule schedule = make(ScheduleKind::kOneForwardOneBackward, 1024, 4096);
  const Simulation result = run(schedule);
  EXPECT_NEAR(result.bubble_fraction, 1023.0 / (4096 + 1023), 1e-9);
  EXPECT_EQ(result.in_flight[0], 1024);
}

}  // namespace

}  // namespace weft::strategy
