#include "ledger.h"

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace weft::memory {
namespace {

// Stands in for an allocator.
class Blocks {
 public:
  explicit Blocks(Ledger& ledger) : ledger_(ledger) {}
  BlockHeader& add(size_t num_bytes) {
    BlockHeader& header = headers_.emplace_back();
    header.num_bytes = num_bytes;
    ledger_.add(header);
    return header;
  }

 private:
  Ledger& ledger_;
  std::deque<BlockHeader> headers_;
};

TEST(Ledger, ThePeakIsTheLargestTotal) {
  Ledger ledger;
  Blocks blocks(ledger);
  ledger.begin_phase("forward", Category::kScratch);
  BlockHeader& large = blocks.add(100);
  ledger.begin_phase("backward", Category::kGradients);
  BlockHeader& small = blocks.add(10);
  ledger.remove(large);
  BlockHeader& middle = blocks.add(60);

  const Totals totals = ledger.totals();
  EXPECT_EQ(totals.current[Category::kGradients], 70);
  EXPECT_EQ(totals.current.total(), 70);
  EXPECT_EQ(totals.peak[Category::kScratch], 100);
  EXPECT_EQ(totals.peak[Category::kGradients], 10);
  EXPECT_EQ(totals.peak.total(), 110);
  EXPECT_EQ(totals.num_allocations, 3U);
  EXPECT_EQ(totals.num_blocks, 2U);

  ledger.remove(small);
  ledger.reset_peak();
  EXPECT_EQ(ledger.totals().peak.total(), 60);
  ledger.remove(middle);
  EXPECT_EQ(ledger.totals().peak.total(), 60);
  EXPECT_EQ(ledger.totals().current, Usage());
}

TEST(Ledger, ACategorySetLaterAppliesToThePeaksThatIncludeTheBlock) {
  Ledger ledger;
  Blocks blocks(ledger);
  BlockHeader& before = blocks.add(1);
  BlockHeader& at_peak = blocks.add(20);
  BlockHeader& gone = blocks.add(100);
  ledger.remove(gone);
  BlockHeader& after = blocks.add(3);
  for (BlockHeader* header : {&before, &at_peak, &after}) {
    ledger.set_category(*header, Category::kParameters);
  }
  const Totals totals = ledger.totals();
  EXPECT_EQ(totals.current[Category::kParameters], 24);
  EXPECT_EQ(totals.peak[Category::kParameters], 21);
  EXPECT_EQ(totals.peak[Category::kOther], 100);
  EXPECT_EQ(totals.peak.total(), 121);
}

TEST(Ledger, EachPhaseHasAPeak) {
  Ledger ledger;
  Blocks blocks(ledger);
  blocks.add(5);
  ledger.begin_phase("forward", Category::kScratch);
  BlockHeader& saved = blocks.add(7);
  ledger.remove(blocks.add(50));
  ledger.begin_phase("backward", Category::kScratch);
  ledger.set_category(saved, Category::kSavedActivations);
  ledger.remove(saved);
  ledger.begin_phase("step", Category::kOther);

  const std::vector<Phase> phases = ledger.phases();
  ASSERT_EQ(phases.size(), 4U);
  EXPECT_EQ(phases[0].name, "start");
  EXPECT_EQ(phases[0].peak.total(), 5);
  EXPECT_EQ(phases[1].name, "forward");
  EXPECT_EQ(phases[1].peak[Category::kSavedActivations], 7);
  EXPECT_EQ(phases[1].peak[Category::kScratch], 50);
  EXPECT_EQ(phases[2].peak[Category::kSavedActivations], 7);
  EXPECT_EQ(phases[2].peak.total(), 12);
  EXPECT_EQ(phases[3].peak.total(), 5);
  EXPECT_LE(phases[1].seconds, phases[2].seconds);

  ledger.reset_peak();
  ASSERT_EQ(ledger.phases().size(), 1U);
  EXPECT_EQ(ledger.phases()[0].name, "step");
}

TEST(Ledger, SharedMemoryCountsFromThePhaseThatAllocatesIt) {
  Ledger ledger;
  Blocks blocks(ledger);
  ledger.remove(blocks.add(100));
  ledger.begin_phase("backward", Category::kOther);
  ledger.remove(blocks.add(50));
  ledger.set_shared_memory(30);
  EXPECT_EQ(ledger.totals().current[Category::kCommunication], 30);
  EXPECT_EQ(ledger.totals().peak.total(), 100) << "the peak of the phase before";
  EXPECT_EQ(ledger.phases()[1].peak.total(), 80);
  ledger.set_shared_memory(70);
  EXPECT_EQ(ledger.totals().peak.total(), 120);
  EXPECT_EQ(ledger.totals().peak[Category::kCommunication], 70);
  ledger.set_shared_memory(75);
  EXPECT_EQ(ledger.totals().peak.total(), 125);
  ledger.set_shared_memory(0);
  EXPECT_EQ(ledger.totals().current, Usage());
  EXPECT_EQ(ledger.totals().peak.total(), 125);
}

TEST(Ledger, KeepsTheNewestPhases) {
  Ledger ledger;
  for (size_t i = 0; i < Ledger::kMaxPhases + 3; ++i) {
    ledger.begin_phase(std::to_string(i), Category::kOther);
  }
  const auto phases = ledger.phases();
  ASSERT_EQ(phases.size(), Ledger::kMaxPhases);
  EXPECT_EQ(phases.front().name, "3");
}

TEST(Ledger, BlocksOfOneCategorySinceAMarkChangeTheirCategory) {
  Ledger ledger;
  Blocks blocks(ledger);
  ledger.begin_phase("forward", Category::kScratch);
  blocks.add(1);
  const uint64_t mark = ledger.mark();
  blocks.add(2);
  ledger.set_category(blocks.add(4), Category::kGradients);
  ledger.remove(blocks.add(8));
  blocks.add(16);
  ledger.set_category_since(mark, Category::kScratch, Category::kSavedActivations);
  const Usage current = ledger.totals().current;
  EXPECT_EQ(current[Category::kScratch], 1);
  EXPECT_EQ(current[Category::kSavedActivations], 18);
  EXPECT_EQ(current[Category::kGradients], 4);
}

TEST(Ledger, AThreadCanHaveACategoryOfItsOwn) {
  Ledger ledger;
  Blocks blocks(ledger);
  {
    const ScopedCategory communication(Category::kCommunication);
    EXPECT_EQ(blocks.add(1).category, Category::kCommunication);
    {
      const ScopedCategory scratch(Category::kScratch);
      EXPECT_EQ(blocks.add(1).category, Category::kScratch);
    }
    EXPECT_EQ(blocks.add(1).category, Category::kCommunication);
    std::thread([&] { EXPECT_EQ(blocks.add(1).category, Category::kOther); }).join();
  }
  EXPECT_EQ(blocks.add(1).category, Category::kOther);
}

TEST(Ledger, ThreadsAndForksDoNotDeadlock) {
  constexpr int kThreads = 4;
  const int64_t before = ledger().totals().current.total();
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      while (!is_over) {
        BlockHeader header;
        header.num_bytes = 3;
        ledger().add(header);
        ledger().set_category(header, Category::kScratch);
        ledger().remove(header);
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // ends the child if it inherits a lock that no thread will release
      BlockHeader header;
      header.num_bytes = 5;
      ledger().add(header);
      ledger().remove(header);
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ledger().totals().current.total(), before);
  EXPECT_LE(ledger().totals().peak.total(), before + 3 * kThreads);
}

}  // namespace
}  // namespace weft::memory
