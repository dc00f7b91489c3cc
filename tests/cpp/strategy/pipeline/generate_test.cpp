#include "weft/strategy/pipeline/generate.h"

#include "../error_of.h"
#include "schedules.h"
#include "weft/strategy/pipeline/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace weft::strategy {

namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;

TEST(Generate, EveryScheduleIsComplete) {
  int64_t num_schedules = 0;
  for_schedules(64, 1, [&](const Schedule& schedule) {
    ASSERT_NO_THROW(check(schedule)) << schedule.to_string();
    ++num_schedules;
  });
  // Four kinds with each divisor of 1 to 16 stages as stages per rank, 50 in total; two kinds with
  // one stage per rank, 16 each; four kinds with two stages per rank, 8 each.
  EXPECT_EQ(num_schedules, 64 * (4 * 50 + 2 * 16 + 4 * 8));
}

TEST(Generate, SmallSchedulesMatchKnownLists) {
  EXPECT_EQ(make(ScheduleKind::kNaive, 2, 2).to_string(), "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n");
  EXPECT_EQ(make(ScheduleKind::kGpipe, 2, 3).to_string(),
            "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n");
  EXPECT_EQ(make(ScheduleKind::kOneForwardOneBackward, 2, 3).to_string(),
            "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
  EXPECT_EQ(make(ScheduleKind::kInterleaved, 2, 2, 2).to_string(),
            "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n");
  EXPECT_EQ(make(ScheduleKind::kZeroBubble, 2, 3).to_string(),
            "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n");
  EXPECT_EQ(make(ScheduleKind::kLoopedBfs, 2, 2, 2).to_string(),
            "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1\n");
}

TEST(Generate, EveryStageIsInItsPlace) {
  for (const ScheduleKind kind : all_schedule_kinds()) {
    for (int64_t p = 1; p <= 8; ++p) {
      for (int64_t v = 1; v <= 3; ++v) {
        if (supports_stages_per_rank(kind, v)) {
          const Schedule schedule = make(kind, p, 3, v);
          EXPECT_THAT(schedule.rank_of(), ElementsAreArray(place_stages(kind, p, v)))
              << to_string(kind) << " " << p << " " << v;
        }
      }
    }
    EXPECT_TRUE(supports_stages_per_rank(kind, default_stages_per_rank(kind)));
  }
  EXPECT_THAT(place_stages(ScheduleKind::kVHalf, 3, 2), ElementsAre(0, 1, 2, 2, 1, 0));
  EXPECT_THAT(place_stages(ScheduleKind::kInterleaved, 3, 2), ElementsAre(0, 1, 2, 0, 1, 2));
}

TEST(Generate, SplitKindsHaveHalves) {
  for (const ScheduleKind kind : all_schedule_kinds()) {
    const std::string text = make(kind, 2, 4, default_stages_per_rank(kind)).to_string();
    EXPECT_EQ(text.find('W') != std::string::npos, splits_backwards(kind)) << text;
  }
}

TEST(Generate, KindsPrintAndParse) {
  for (const ScheduleKind kind : all_schedule_kinds()) {
    EXPECT_EQ(parse_schedule_kind(to_string(kind)), kind);
  }
  EXPECT_EQ(error_of([] { parse_schedule_kind("1f1"); }),
            "unknown schedule '1f1': use one of naive, gpipe, 1f1b, interleaved, zero_bubble, "
            "looped_bfs, zbv, dualpipev, v_half, v_min; the nearest is '1f1b'");
}

TEST(Generate, RejectsNumbersThatMakeNoSchedule) {
  EXPECT_THAT(error_of([] { make(ScheduleKind::kGpipe, 0, 1); }), HasSubstr("num_ranks is 0"));
  EXPECT_THAT(error_of([] { make(ScheduleKind::kGpipe, 1, -1); }),
              HasSubstr("num_micro_batches is -1"));
  EXPECT_THAT(error_of([] { make(ScheduleKind::kLoopedBfs, 1, 1, 0); }),
              HasSubstr("stages_per_rank is 0"));
  EXPECT_EQ(error_of([] { make(ScheduleKind::kZeroBubble, 2, 2, 2); }),
            "schedule 'zero_bubble' has one stage on each rank and got 2; use 'interleaved' or "
            "'looped_bfs'");
  for (const int64_t v : {1, 3}) {
    EXPECT_EQ(error_of([&] { make(ScheduleKind::kVHalf, 2, 2, v); }),
              "schedule 'v_half' has two stages on each rank and got " + std::to_string(v) +
                  "; cut the model into two stages for each rank (stages_per_rank=2), or use "
                  "'1f1b' or 'interleaved'");
  }
}

}  // namespace

}  // namespace weft::strategy
