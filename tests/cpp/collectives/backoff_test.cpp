// The steps of a waiting rank, and the processors that ranks publish.

#include "backoff.h"

#include "ranks.h"
#include "segment.h"

#include <gtest/gtest.h>

#include <sched.h>
#include <thread>
#include <vector>

namespace weft::collectives {
namespace {

using std::chrono::microseconds;
using Step = Backoff::Step;

// A clock that each reading moves on by a microsecond.
struct Ticks {
  Backoff::TimePoint operator()() const { return Backoff::TimePoint(microseconds(num_reads++)); }
  mutable int num_reads = 0;
};

TEST(Backoff, SpinsThenYieldsThenSleeps) {
  Backoff backoff(120, microseconds(3));
  const Ticks now;
  int num_looks = 0;
  const auto alone = [&] {
    ++num_looks;
    return false;
  };
  for (int round = 0; round < 2; ++round) {
    const int num_reads = now.num_reads;
    for (int i = 0; i < 120; ++i) ASSERT_EQ(backoff.next(alone, now), Step::kSpin) << i;
    EXPECT_EQ(now.num_reads, num_reads);
    for (int i = 0; i < 3; ++i) ASSERT_EQ(backoff.next(alone, now), Step::kYield) << i;
    for (int i = 0; i < 2; ++i) ASSERT_EQ(backoff.next(alone, now), Step::kSleep) << i;
    EXPECT_EQ(num_looks, 120 / Backoff::kSpinsBeforeLook * (round + 1));
    backoff.reset();
  }
}

TEST(Backoff, YieldsAfterALookThatFindsAnotherRank) {
  Backoff backoff(2000, microseconds(1));
  const Ticks now;
  int num_looks = 0;
  const auto at_second_look = [&] { return ++num_looks == 2; };
  for (int i = 0; i < 2 * Backoff::kSpinsBeforeLook; ++i) {
    ASSERT_EQ(backoff.next(at_second_look, now), Step::kSpin) << i;
  }
  EXPECT_EQ(backoff.next(at_second_look, now), Step::kYield);
  EXPECT_EQ(backoff.next(at_second_look, now), Step::kSleep);
  EXPECT_EQ(num_looks, 2);
}

TEST(Backoff, FewSpinsNeedNoLook) {
  Backoff backoff(Backoff::kSpinsBeforeLook - 1, microseconds(1));
  const Ticks now;
  const auto fails = [] {
    ADD_FAILURE();
    return true;
  };
  for (int i = 1; i < Backoff::kSpinsBeforeLook; ++i) {
    ASSERT_EQ(backoff.next(fails, now), Step::kSpin);
  }
  EXPECT_EQ(backoff.next(fails, now), Step::kYield);
  Backoff background(0, microseconds(0));
  EXPECT_EQ(background.next(fails, now), Step::kSleep);
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

// Returns whether a group is crowded if rank i runs on the processor `processors[i]` only when it
// joins, and uses the group, so that all ranks look while the group lives.
std::vector<bool> crowded(const std::vector<int>& processors) {
  std::vector<char> is_crowded(processors.size());
  testing::MemoryStore store;
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < processors.size(); ++rank) {
    threads.emplace_back([&, rank] {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(processors[rank], &one);
      EXPECT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
      const auto size = static_cast<int>(processors.size());
      const auto engine =
          make_engine(store.view(), testing::group_of(size, static_cast<int>(rank)));
      is_crowded[rank] = CrowdedGroup::exists();
      testing::complete(*engine, barrier_call());
    });
  }
  for (std::thread& thread : threads) thread.join();
  return {is_crowded.begin(), is_crowded.end()};
}

TEST(CrowdedGroup, CountsTheProcessorsOfAllRanks) {
  cpu_set_t usable;
  ASSERT_EQ(sched_getaffinity(0, sizeof usable, &usable), 0);
  std::vector<int> processors;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &usable)) processors.push_back(i);
  }
  const int first = processors.front();
  EXPECT_EQ(crowded({first, first}), (std::vector<bool>{true, true}));
  EXPECT_FALSE(CrowdedGroup::exists());  // the groups have ended
  if (processors.size() < 2) GTEST_SKIP() << "needs two processors";
  EXPECT_EQ(crowded({first, processors[1]}), (std::vector<bool>{false, false}));
  EXPECT_EQ(crowded({first, processors[1], first}), (std::vector<bool>(3, true)));
}

TEST(CrowdedGroup, ConcernsAllGroupsOfTheProcess) {
  ASSERT_FALSE(CrowdedGroup::exists());
  const CrowdedGroup apart(false);
  EXPECT_FALSE(CrowdedGroup::exists());
  {
    const CrowdedGroup together(true);
    EXPECT_TRUE(CrowdedGroup::exists());
  }
  EXPECT_FALSE(CrowdedGroup::exists());
}

}  // namespace
}  // namespace weft::collectives
