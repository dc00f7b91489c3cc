#include "weft/strategy/pipeline/check.h"

#include "../error_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace weft::strategy {

namespace {

using testing::HasSubstr;

std::string check_error(const std::string& csv, int64_t channel_capacity = 0) {
  return error_of([&] { check(Schedule::parse(csv), channel_capacity); });
}

TEST(Check, AcceptsCompleteSchedules) {
  for (const char* csv : {"0F0,0B0\n",
                          "0F0,0I0,0W0\n",
                          "0F0,0F1\n1F0,1F1\n",
                          "0F0,1F0,1B0,0B0\n",
                          "0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0\n",
                          "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
                          "0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0RESHARD\n"}) {
    EXPECT_NO_THROW(check(Schedule::parse(csv))) << csv;
  }
}

TEST(Check, NamesMissingActions) {
  EXPECT_EQ(check_error("0F0,0B0,0F1,0B1\n1F0,1B0\n"),
            "schedule: 3 forwards for 2 stages and 2 micro-batches; write each stage's forward of "
            "each micro-batch once, 4 in all");
  EXPECT_EQ(check_error("0F0,0B0\n1F0\n"), "schedule: 1B0 is missing; add it");
  EXPECT_EQ(check_error("0F0,0I0\n"), "schedule: 0W0 is missing; add it");
  EXPECT_EQ(
      check_error("0F0,0B0,0RECV_B0\n1F0,1B0,1SEND_B0,1RECV_F0\n"),
      "schedule: 0B0 needs a gradient that no receive was posted for; put 0RECV_B0 before it");
  EXPECT_EQ(check_error("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"),
            "schedule: 0SEND_F0 is missing; add it");
  EXPECT_EQ(check_error("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0\n"),
            "schedule: 1SEND_B0 is missing; add it");
  EXPECT_EQ(check_error("0F0,0SEND_F0\n1F0\n"),
            "schedule: 1F0 needs an input that no receive was posted for; put 1RECV_F0 before it");
  EXPECT_EQ(check_error("0UNSHARD,0F0,0B0\n"),
            "schedule: 0UNSHARD has no RESHARD after it; add one");
  EXPECT_THAT(check_error("0F0,0F2000000000\n"),
              HasSubstr("2 forwards for 1 stages and 2000000001"));
}

TEST(Check, NamesSuperfluousActions) {
  EXPECT_EQ(check_error("0F0,0B0,0B0\n"), "schedule: 0B0 comes twice; remove one");
  EXPECT_EQ(check_error("0F0,0B0,0I0\n"),
            "schedule: 0I0 comes after another backward of the same micro-batch; remove one");
  EXPECT_EQ(check_error("0F0,0SEND_F0\n"),
            "schedule: 0SEND_F0 crosses no boundary between ranks; remove it");
  EXPECT_EQ(check_error("0F0,0SEND_F0,1F0,0RECV_B0,1B0,0B0\n"),
            "schedule: 0SEND_F0 crosses no boundary between ranks; remove it");
  EXPECT_EQ(check_error("0UNSHARD,0UNSHARD,0F0,0RESHARD\n"),
            "schedule: 0UNSHARD comes while its stage is unsharded; remove it");
  EXPECT_EQ(check_error("0RESHARD,0F0\n"),
            "schedule: 0RESHARD comes while its stage is sharded; remove it");
}

TEST(Check, NamesBackwardMessagesWithoutABackward) {
  EXPECT_EQ(check_error("0F0,0SEND_F0,0RECV_B0\n1RECV_F0,1F0\n"),
            "schedule: 0RECV_B0 belongs to a backward, and there is none; remove it");
}

TEST(Check, NamesActionsOutOfOrder) {
  EXPECT_EQ(check_error("0B0,0F0\n"), "schedule: 0B0 comes before its forward; put 0F0 before it");
  EXPECT_THAT(check_error("0F0,0W0,0I0\n"), HasSubstr("0W0 comes before the half"));
  EXPECT_THAT(check_error("0SEND_F0,0F0\n1RECV_F0,1F0\n"),
              HasSubstr("sends an output that is not computed yet"));
  EXPECT_THAT(check_error("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_B0,1B0\n"),
              HasSubstr("1SEND_B0 sends a gradient that is not computed yet"));
  EXPECT_THAT(check_error("0UNSHARD,0F0,0RESHARD,0B0\n"),
              HasSubstr("0B0 comes while its stage is sharded"));
  EXPECT_THAT(check_error("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n"),
              HasSubstr("1RECV_F1 is posted out of the order in which the other stage sends"));
}

TEST(Check, DetectsDeadlocks) {
  EXPECT_EQ(
      check_error("1F0,0F0\n2F0\n"),
      "schedule: the ranks would deadlock: rank 0 at 1F0, rank 1 at 2F0; reorder their actions, "
      "or post receives earlier");
  // Stage 1 waits for micro-batch 1, while stage 0 waits for the gradient of micro-batch 0.
  EXPECT_THAT(check_error("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"),
              HasSubstr("rank 0 at 0B0, rank 1 at 1F1"));
}

TEST(Check, SendsBlockAtTheChannelCapacity) {
  // Both ranks send before the other has posted the receive.
  const std::string csv =
      "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
      "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
  EXPECT_THAT(check_error(csv, 0), HasSubstr("rank 0 at 0SEND_F1, rank 1 at 1SEND_B0"));
  EXPECT_NO_THROW(check(Schedule::parse(csv), 1));
  EXPECT_THAT(check_error(csv, -1), HasSubstr("a channel's capacity is -1"));
}

}  // namespace

}  // namespace weft::strategy
