#include "schedules.h"
#include "weft/strategy/pipeline/check.h"
#include "weft/strategy/pipeline/passes.h"
#include "weft/strategy/pipeline/simulate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace weft::strategy {

namespace {

using testing::Each;
using testing::Le;

constexpr ScheduleKind kPackedKinds[] = {
    ScheduleKind::kZeroBubbleV, ScheduleKind::kVHalf, ScheduleKind::kVMin};
constexpr ScheduleKind kVKinds[] = {ScheduleKind::kZeroBubbleV,
                                    ScheduleKind::kVHalf,
                                    ScheduleKind::kVMin,
                                    ScheduleKind::kDualPipeV};

// Every action takes one unit of time, and a byte is kept for each forward in flight.
Simulation run(ScheduleKind kind, int64_t p, int64_t m) {
  return simulate(make(kind, p, m, 2), std::vector<StageCost>{{.activation_bytes = 1}});
}

// The time, in units, in which a rank is idle.
int64_t idle(const Simulation& simulation, int64_t m) {
  return static_cast<int64_t>(simulation.makespan) - 6 * m;
}

int64_t most_in_flight(const Simulation& simulation) {
  return *std::max_element(simulation.peak_bytes.begin(), simulation.peak_bytes.end());
}

// The most forwards in flight on a rank.
int64_t limit_of(ScheduleKind kind, int64_t p) {
  switch (kind) {
    case ScheduleKind::kDualPipeV:
      return 2 * p + 1;
    case ScheduleKind::kVHalf:
      return 2 * (p / 2 + 1);
    case ScheduleKind::kVMin:
      return 2 * ((p + 4) / 3);
    default:
      return 2 * p;
  }
}

TEST(VSchedules, AreCompleteOnManyRanks) {
  for (const ScheduleKind kind : kVKinds) {
    for (int64_t p = 9; p <= 40; ++p) {
      for (const int64_t m : {int64_t{1}, p - 1, p + 1, 2 * p, 2 * p + 5}) {
        const Schedule schedule = make(kind, p, m, 2);
        ASSERT_NO_THROW(check(schedule)) << to_string(kind) << " " << p << " " << m;
        ASSERT_LE(
            most_in_flight(simulate(schedule, std::vector<StageCost>{{.activation_bytes = 1}})),
            limit_of(kind, p));
      }
    }
  }
}

TEST(VSchedules, SmallSchedulesMatchKnownLists) {
  EXPECT_EQ(make(ScheduleKind::kZeroBubbleV, 2, 2, 2).to_string(),
            "0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,0I1,3W1,0W0,0W1\n"
            "1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1\n");
  EXPECT_EQ(make(ScheduleKind::kVHalf, 3, 3, 2).to_string(),
            "0F0,0F1,0F2,5F0,5I0,5W0,5F1,5I1,0I0,5W1,0W0,5F2,5I2,0I1,5W2,0W1,0I2,0W2\n"
            "1F0,1F1,1F2,4F0,4I0,4W0,4F1,1I0,1W0,4I1,4W1,4F2,1I1,4I2,1W1,4W2,1I2,1W2\n"
            "2F0,3F0,2F1,3F1,3I0,2I0,3W0,2F2,2W0,3F2,3I1,2I1,3W1,2W1,3I2,2I2,3W2,2W2\n");
  EXPECT_EQ(make(ScheduleKind::kDualPipeV, 2, 4, 2).to_string(),
            "0F0,0F1,0F2,3F0,3I0,3W0,3F1,0F3,3B1,3F2,0B0,3B2,3F3,0B1,3B3,0I2,0W2,0I3,0W3\n"
            "1F0,2F0,1F1,2F1,1F2,2B0,2F2,1B0,1F3,2B1,2F3,1B1,2B2,1B2,2I3,1I3,2W3,1W3\n");
}

TEST(VSchedules, SendNothingBetweenTheStagesOfOneRank) {
  for (const ScheduleKind kind : kVKinds) {
    for (int64_t p = 1; p <= 6; ++p) {
      const int64_t m = 2 * p + 1;
      int64_t num_sends = 0;
      const Schedule lowered = add_communication(make(kind, p, m, 2));
      for (const auto& actions : lowered.ranks()) {
        for (const Action& action : actions) {
          num_sends += action.kind == ActionKind::kSendForward ? 1 : 0;
          num_sends += action.kind == ActionKind::kSendBackward ? 1 : 0;
          const bool is_down =
              action.kind == ActionKind::kSendForward || action.kind == ActionKind::kRecvBackward;
          EXPECT_FALSE(is_down && action.stage == p - 1) << to_string(action);
          const bool is_up =
              action.kind == ActionKind::kRecvForward || action.kind == ActionKind::kSendBackward;
          EXPECT_FALSE(is_up && action.stage == p) << to_string(action);
        }
      }
      EXPECT_EQ(num_sends, 2 * m * (2 * p - 2));  // of 2p - 1 boundaries, one is inside of a rank
    }
  }
}

// No schedule is faster for m >= p, because the last rank begins p - 1 units late, nor for m = 1,
// because the first micro-batch takes 4p + 1 units.
TEST(VSchedules, ZeroBubbleVIsIdleOnlyForTheFirstMicroBatch) {
  for (int64_t p = 1; p <= 10; ++p) {
    for (int64_t m = 1; m <= 40; ++m) {
      const Simulation result = run(ScheduleKind::kZeroBubbleV, p, m);
      const int64_t expected = std::max({p - 1, 3 * p - 1 - 2 * m, 4 * p - 1 - 4 * m});
      EXPECT_EQ(idle(result, m), p == 1 ? 0 : expected) << p << " " << m;
      EXPECT_EQ(most_in_flight(result), std::min(2 * p, 2 * m)) << p << " " << m;
    }
  }
}

// With m >= 2p, no rank is idle between its first and its last action.
TEST(VSchedules, ZeroBubbleVHasNoBubbleInside) {
  for (int64_t p = 1; p <= 10; ++p) {
    for (int64_t m = 2 * p; m <= 2 * p + 7; ++m) {
      const Simulation result = run(ScheduleKind::kZeroBubbleV, p, m);
      for (int64_t rank = 0; rank < p; ++rank) {
        const auto& spans = result.ranks[static_cast<size_t>(rank)];
        EXPECT_EQ(spans.back().end - spans.front().start, static_cast<double>(6 * m))
            << p << " " << m << " " << rank;
      }
    }
  }
}

TEST(VSchedules, IdleTimeAndMemoryFollowTheFormulas) {
  for (int64_t p = 2; p <= 10; ++p) {
    const int64_t of_1f1b = 6 * (p - 1);
    for (int64_t m = 2 * p; m <= 4 * p + 3; ++m) {
      const auto idle_of = [&](ScheduleKind kind) { return idle(run(kind, p, m), m); };
      EXPECT_EQ(idle_of(ScheduleKind::kDualPipeV), p - 1) << p << " " << m;
      EXPECT_LE(idle_of(ScheduleKind::kVHalf), p % 2 == 0 && p > 2 ? 3 * p - 7 : 3 * p - 4);
      EXPECT_LE(2 * idle_of(ScheduleKind::kVHalf), of_1f1b);
      EXPECT_LE(idle_of(ScheduleKind::kVMin), 4 * p - 5) << p << " " << m;
      EXPECT_LE(3 * idle_of(ScheduleKind::kVMin), 2 * of_1f1b);
      for (const ScheduleKind kind : kVKinds) {
        // The idle time does not grow with the micro-batches.
        EXPECT_EQ(idle_of(kind), idle(run(kind, p, m + 50), m + 50)) << to_string(kind) << " " << p;
        EXPECT_EQ(most_in_flight(run(kind, p, m)), limit_of(kind, p))
            << to_string(kind) << " " << p;
      }
    }
  }
}

TEST(VSchedules, RanksHoldAlike) {
  for (int64_t p = 2; p <= 10; ++p) {
    for (const ScheduleKind kind : kVKinds) {
      const auto bytes = run(kind, p, 4 * p).peak_bytes;
      const auto [least, most] = std::minmax_element(bytes.begin(), bytes.end());
      EXPECT_GE(*least, *most - 2) << to_string(kind) << " " << p;
    }
  }
}

// Few micro-batches: no more idle time than for one, which passes the stages twice.
TEST(VSchedules, FewMicroBatchesAddNoIdleTime) {
  for (const ScheduleKind kind : kPackedKinds) {
    for (int64_t p = 2; p <= 10; ++p) {
      for (int64_t m = 1; m <= 2 * p; ++m) {
        const Simulation result = run(kind, p, m);
        EXPECT_LE(idle(result, m), 4 * p - 5) << to_string(kind) << " " << p << " " << m;
        EXPECT_THAT(result.peak_bytes, Each(Le(std::min(2 * m, limit_of(kind, p)))));
      }
    }
  }
}

// With actions of other lengths and messages that take time, the memory stays the same, and a step
// of the kinds that do not save memory is not slower than that of 1F1B, whose stages are twice as
// large.
TEST(VSchedules, UnequalTimesKeepTheLimit) {
  const StageCost cost{.forward = 2,
                       .backward_input = 3,
                       .backward_weight = 1,
                       .transfer = 0.25,
                       .activation_bytes = 1};
  StageCost of_both = cost;
  of_both.forward *= 2;
  of_both.backward_input *= 2;
  of_both.backward_weight *= 2;
  for (const ScheduleKind kind : kVKinds) {
    for (int64_t p = 1; p <= 8; ++p) {
      const int64_t m = 3 * p;
      const Simulation result = simulate(make(kind, p, m, 2), std::vector<StageCost>{cost});
      EXPECT_THAT(result.peak_bytes, Each(Le(limit_of(kind, p))));
      const Simulation other = simulate(make(ScheduleKind::kOneForwardOneBackward, p, m),
                                        std::vector<StageCost>{of_both});
      if (kind == ScheduleKind::kZeroBubbleV || kind == ScheduleKind::kDualPipeV) {
        EXPECT_LE(result.makespan, other.makespan) << to_string(kind) << " " << p;
      }
    }
  }
}

}  // namespace

}  // namespace weft::strategy
