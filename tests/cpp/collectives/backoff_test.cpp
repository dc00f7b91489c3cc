// The steps of a waiting rank, and the processors that ranks publish.

#include "backoff.h"

#include "segment.h"

#include <gtest/gtest.h>

#include <sched.h>

namespace weft::collectives {
namespace {

using Step = Backoff::Step;

TEST(Backoff, SpinsThenYieldsThenSleeps) {
  Backoff backoff(120, 3);
  int num_looks = 0;
  const auto alone = [&] {
    ++num_looks;
    return false;
  };
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 120; ++i) ASSERT_EQ(backoff.next(alone), Step::kSpin) << i;
    for (int i = 0; i < 3; ++i) ASSERT_EQ(backoff.next(alone), Step::kYield) << i;
    for (int i = 0; i < 2; ++i) ASSERT_EQ(backoff.next(alone), Step::kSleep) << i;
    EXPECT_EQ(num_looks, 120 / Backoff::kSpinsBeforeLook * (round + 1));
    backoff.reset();
  }
}

TEST(Backoff, YieldsAfterALookThatFindsAnotherRank) {
  Backoff backoff(2000, 1);
  int num_looks = 0;
  const auto at_second_look = [&] { return ++num_looks == 2; };
  for (int i = 0; i < 2 * Backoff::kSpinsBeforeLook; ++i) {
    ASSERT_EQ(backoff.next(at_second_look), Step::kSpin) << i;
  }
  EXPECT_EQ(backoff.next(at_second_look), Step::kYield);
  EXPECT_EQ(backoff.next(at_second_look), Step::kSleep);
  EXPECT_EQ(num_looks, 2);
}

TEST(Backoff, FewSpinsNeedNoLook) {
  Backoff backoff(Backoff::kSpinsBeforeLook - 1, 1);
  const auto fails = [] {
    ADD_FAILURE();
    return true;
  };
  for (int i = 1; i < Backoff::kSpinsBeforeLook; ++i) ASSERT_EQ(backoff.next(fails), Step::kSpin);
  EXPECT_EQ(backoff.next(fails), Step::kYield);
  Backoff background(0, 0);
  EXPECT_EQ(background.next(fails), Step::kSleep);
}

TEST(Backoff, RanksFindThoseOnTheirProcessor) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  const SharedSizes sizes = SharedSizes::within(3, 1 << 20);
  const Segment segment = Segment::create(SharedState::num_bytes(sizes));
  const SharedState shared(segment.data(), sizes);
  shared.initialize();
  EXPECT_FALSE(shares_processor(shared, 0));
  publish_processor(shared, 0);
  EXPECT_EQ(shared.rank(0).processor.load(), sched_getcpu());
  EXPECT_FALSE(shares_processor(shared, 0));
  EXPECT_TRUE(shares_processor(shared, 1));
  shared.rank(2).processor.store(sched_getcpu() + 1);
  EXPECT_FALSE(shares_processor(shared, 0));
  publish_processor(shared, 2);
  EXPECT_TRUE(shares_processor(shared, 0));
  EXPECT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

}  // namespace
}  // namespace weft::collectives
