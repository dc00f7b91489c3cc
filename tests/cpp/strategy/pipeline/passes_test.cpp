#include "weft/strategy/pipeline/passes.h"

#include "../error_of.h"
#include "schedules.h"
#include "weft/strategy/pipeline/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace weft::strategy {

namespace {

using testing::HasSubstr;

// Returns the compute actions of a lowered schedule.
Schedule without_communication(const Schedule& schedule) {
  std::vector<std::vector<Action>> ranks;
  for (const auto& actions : schedule.ranks()) {
    auto& compute_actions = ranks.emplace_back();
    for (const Action& action : actions) {
      if (is_compute(action.kind)) {
        compute_actions.push_back(action);
      }
    }
  }
  return Schedule(std::move(ranks));
}

TEST(AddCommunication, MakesSchedulesThatNeverDeadlock) {
  for_schedules(9, 11, [](const Schedule& schedule) {
    for (const int64_t prefetch : {0, 1, 3}) {
      const Schedule lowered =
          add_communication(schedule, {.channel_capacity = 0, .prefetch = prefetch});
      ASSERT_NO_THROW(check(lowered, 0)) << lowered.to_string();
      ASSERT_EQ(without_communication(lowered), schedule);
    }
    const Schedule buffered = add_communication(schedule, {.channel_capacity = 1, .prefetch = 0});
    ASSERT_NO_THROW(check(buffered, 1)) << buffered.to_string();
  });
}

TEST(AddCommunication, PutsReceivesWhereTheyAreNeeded) {
  const Schedule schedule = make(ScheduleKind::kOneForwardOneBackward, 2, 2);
  EXPECT_EQ(add_communication(schedule, {.channel_capacity = 1, .prefetch = 0}).to_string(),
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n");
  // If a send blocks until its receive is posted, 1RECV_F1 must precede 1SEND_B0 to avoid a
  // deadlock.
  EXPECT_EQ(add_communication(schedule, {.channel_capacity = 0, .prefetch = 0}).to_string(),
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1,1B1,1SEND_B1\n");
  EXPECT_EQ(add_communication(schedule).to_string(),
            "0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1\n"
            "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n");
}

TEST(AddCommunication, StagesOnOneRankSendNothingToEachOther) {
  const Schedule v = Schedule::parse("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n");
  EXPECT_EQ(add_communication(v, {.channel_capacity = 0, .prefetch = 0}).to_string(),
            "0F0,0SEND_F0,3RECV_F0,3F0,3B0,3SEND_B0,0RECV_B0,0B0\n"
            "1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,2B0,1B0,1SEND_B0\n");
}

// Orders that no generator produces: the result must be free of deadlocks for every valid order.
TEST(AddCommunication, AcceptsRandomOrders) {
  std::mt19937 random(7);
  int64_t num_accepted = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const auto num_ranks = std::uniform_int_distribution<int32_t>(1, 4)(random);
    const auto v = std::uniform_int_distribution<int32_t>(1, 2)(random);
    const auto kind =
        v == 2 && trial % 2 == 0 ? ScheduleKind::kZeroBubbleV : ScheduleKind::kLoopedBfs;
    const std::vector<int32_t> rank_of = place_stages(kind, num_ranks, v);
    const auto m = std::uniform_int_distribution<int32_t>(1, 4)(random);
    // A random order of all actions that respects their dependencies, distributed to the ranks.
    std::vector<std::vector<Action>> ranks(static_cast<size_t>(num_ranks));
    std::vector<Action> ready;
    for (int32_t i = 0; i < m; ++i) {
      ready.push_back({0, i, ActionKind::kForward});
    }
    const int32_t num_stages = num_ranks * v;
    while (!ready.empty()) {
      const auto at = std::uniform_int_distribution<size_t>(0, ready.size() - 1)(random);
      const Action action = ready[at];
      ready.erase(ready.begin() + static_cast<ptrdiff_t>(at));
      ranks[static_cast<size_t>(rank_of[static_cast<size_t>(action.stage)])].push_back(action);
      if (action.kind == ActionKind::kForward) {
        const bool is_last = action.stage + 1 == num_stages;
        ready.push_back(is_last ? Action{action.stage, action.micro_batch, ActionKind::kBackward}
                                : Action{action.stage + 1, action.micro_batch, action.kind});
      } else if (action.stage > 0) {
        ready.push_back({action.stage - 1, action.micro_batch, action.kind});
      }
    }
    const Schedule schedule(std::move(ranks));
    check(schedule);
    for (const int64_t capacity : {0, 1, 2}) {
      const Schedule lowered =
          add_communication(schedule, {.channel_capacity = capacity, .prefetch = trial % 3});
      ASSERT_NO_THROW(check(lowered, capacity)) << lowered.to_string();
      ASSERT_EQ(without_communication(lowered), schedule);
    }
    ++num_accepted;
  }
  EXPECT_EQ(num_accepted, 3000);
}

TEST(AddCommunication, RejectsSchedulesWithCommunication) {
  const Schedule schedule = make(ScheduleKind::kGpipe, 2, 1);
  const Schedule lowered = add_communication(schedule);
  EXPECT_THAT(error_of([&] { add_communication(lowered); }),
              HasSubstr("sends or receives already"));
  EXPECT_THAT(error_of([&] { forward_only(lowered); }), HasSubstr("sends or receives already"));
  EXPECT_THAT(error_of([&] { add_communication(schedule, {.channel_capacity = -1}); }),
              HasSubstr("pass 0 or more for both"));
}

TEST(AddUnshards, NeverHoldsMoreUnshardedStagesThanAllowed) {
  for_schedules(9, 11, [](const Schedule& schedule) {
    const Schedule lowered = add_communication(schedule);
    for (const int64_t max_unsharded : {1, 2, 3}) {
      const Schedule sharded = add_unshards(lowered, max_unsharded);
      ASSERT_NO_THROW(check(sharded)) << sharded.to_string();
      for (const auto& actions : sharded.ranks()) {
        int64_t num_unsharded = 0;
        for (const Action& action : actions) {
          num_unsharded += action.kind == ActionKind::kUnshard ? 1 : 0;
          num_unsharded -= action.kind == ActionKind::kReshard ? 1 : 0;
          ASSERT_LE(num_unsharded, max_unsharded);
        }
      }
    }
  });
}

TEST(AddUnshards, UnshardsTheNextStageEarly) {
  const Schedule schedule = Schedule::parse("0F0,1F0,2F0,2B0,1B0,0B0\n");
  EXPECT_EQ(add_unshards(schedule, 1).to_string(),
            "0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1RESHARD,2UNSHARD,2F0,2B0,2RESHARD,1UNSHARD,1B0,"
            "1RESHARD,0UNSHARD,0B0,0RESHARD\n");
  EXPECT_EQ(add_unshards(schedule, 2).to_string(),
            "0UNSHARD,1UNSHARD,0F0,1F0,0RESHARD,2UNSHARD,2F0,2B0,2RESHARD,0UNSHARD,1B0,1RESHARD,"
            "0B0,0RESHARD\n");
  EXPECT_THAT(error_of([&] { add_unshards(schedule, 0); }), HasSubstr("max_unsharded is 0"));
  EXPECT_THAT(error_of([&] { add_unshards(add_unshards(schedule)); }),
              HasSubstr("it has 0UNSHARD already"));
}

TEST(MergeBackwards, MergesOnlyAdjacentHalves) {
  const Schedule schedule = make(ScheduleKind::kZeroBubble, 2, 3);
  EXPECT_EQ(merge_backwards(schedule).to_string(),
            "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n");
  // If the halves were merged, the previous stage on another rank would also wait for the weight
  // half.
  EXPECT_EQ(merge_backwards(make(ScheduleKind::kZeroBubble, 2, 1)).to_string(),
            "0F0,0B0\n1F0,1I0,1W0\n");
  EXPECT_EQ(merge_backwards(Schedule::parse("0F0,1F0,1I0,1W0,0I0,0W0\n")).to_string(),
            "0F0,1F0,1B0,0B0\n");
}

TEST(ForwardOnly, KeepsOnlyForwards) {
  const Schedule schedule = make(ScheduleKind::kZeroBubble, 2, 2);
  const Schedule forwards = forward_only(schedule);
  EXPECT_EQ(forwards.to_string(), "0F0,0F1\n1F0,1F1\n");
  EXPECT_NO_THROW(check(add_communication(forwards)));
}

TEST(FirstMicroBatches, KeepTheirOrder) {
  const Schedule schedule = make(ScheduleKind::kOneForwardOneBackward, 2, 4);
  EXPECT_EQ(first_micro_batches(schedule, 2).to_string(), "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  EXPECT_EQ(first_micro_batches(schedule, 4), schedule);
  EXPECT_THAT(error_of([&] { first_micro_batches(schedule, 5); }),
              HasSubstr("5 for a schedule of 4"));
  EXPECT_THAT(error_of([&] { first_micro_batches(schedule, 0); }),
              HasSubstr("0 for a schedule of 4"));
  EXPECT_THAT(error_of([&] { first_micro_batches(add_communication(schedule), 2); }),
              HasSubstr("sends or receives already"));
  EXPECT_THAT(error_of([&] { first_micro_batches(add_unshards(schedule), 2); }),
              HasSubstr("it has 0UNSHARD already"));
  for_schedules(9, 11, [](const Schedule& complete) {
    for (const int64_t n : {int64_t{1}, (complete.num_micro_batches() + 1) / 2}) {
      ASSERT_NO_THROW(check(add_communication(first_micro_batches(complete, n))))
          << complete.to_string();
    }
  });
}

}  // namespace

}  // namespace weft::strategy
