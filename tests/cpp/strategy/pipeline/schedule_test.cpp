#include "weft/strategy/pipeline/schedule.h"

#include "../error_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weft::strategy {

namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Action, PrintsAndParsesEveryKind) {
  for (const char* text : {"0F0",
                           "2B13",
                           "0I2",
                           "0W2",
                           "1SEND_F0",
                           "1RECV_F0",
                           "1SEND_B7",
                           "1RECV_B7",
                           "12UNSHARD",
                           "12RESHARD"}) {
    EXPECT_EQ(to_string(parse_action(text)), text);
  }
  EXPECT_EQ(parse_action("12SEND_F34"),
            (Action{.stage = 12, .micro_batch = 34, .kind = ActionKind::kSendForward}));
}

TEST(Action, RejectsTextsThatAreNotActions) {
  for (const char* text : {"",
                           "F",
                           "1F",
                           "F1",
                           "1G2",
                           "1F2x",
                           "-1F2",
                           "01F2",
                           "1F02",
                           "1UNSHARD3",
                           "1f2",
                           "1 F2",
                           "12",
                           "1F99999999999",
                           "99999999999F1"}) {
    EXPECT_THAT(error_of([&] { parse_action(text); }), HasSubstr("cannot read the action")) << text;
  }
}

TEST(Schedule, PrintsAndParses) {
  const std::string csv = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n";
  const Schedule schedule = Schedule::parse(csv);
  EXPECT_EQ(schedule.to_string(), csv);
  EXPECT_EQ(schedule.num_ranks(), 2);
  EXPECT_EQ(schedule.num_stages(), 2);
  EXPECT_EQ(schedule.num_micro_batches(), 2);
  EXPECT_THAT(schedule.rank_of(), ElementsAre(0, 1));
  EXPECT_TRUE(schedule.has_backward());
  EXPECT_FALSE(schedule.has_communication());
  EXPECT_EQ(Schedule::parse("0F0, ,0F1 ,0B0,0B1,,\r\n,1F0,1B0,1F1,1B1\r\n"), schedule);
  EXPECT_EQ(Schedule::parse(""), Schedule());
}

TEST(Schedule, RanksMayHaveSeveralStagesInAnyOrder) {
  const Schedule schedule = Schedule::parse("0F0,3F0\n1F0,2F0\n");
  EXPECT_THAT(schedule.rank_of(), ElementsAre(0, 1, 1, 0));
  EXPECT_FALSE(schedule.has_backward());
}

TEST(Schedule, RejectsInvalidLists) {
  EXPECT_EQ(error_of([] { Schedule::parse("0F0\n0F1\n"); }),
            "schedule: stage 0 is on rank 0 and on rank 1; give it to one of them");
  EXPECT_EQ(error_of([] { Schedule::parse("0F0\n2F0\n"); }),
            "schedule: no rank has stage 1 of 3; number the stages from 0 without a gap");
  EXPECT_EQ(error_of([] { Schedule::parse("0F0\n\n1F0\n"); }),
            "schedule: rank 1 computes nothing; give each rank a stage, or use fewer ranks");
  EXPECT_THAT(error_of([] { Schedule::parse("0F0\n1X0\n"); }),
              HasSubstr("schedule, line 2: cannot read the action '1X0'"));
  EXPECT_THAT(error_of([] { Schedule::parse("0F0\n999999999F0\n"); }),
              HasSubstr("has a stage above 16777215"));
  EXPECT_THAT(error_of([] {
                Schedule({{Action{-1, 0, ActionKind::kForward}}});
              }),
              HasSubstr("-1F0 on rank 0 has a negative number"));
}

}  // namespace

}  // namespace weft::strategy
