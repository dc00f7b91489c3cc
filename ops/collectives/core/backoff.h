#pragma once

// The steps of a waiting rank between two polls: it spins, then yields its processor, then sleeps.

#include "shared_state.h"

#include <chrono>
#include <utility>

namespace weft::collectives {

// Spinning is cheaper than a wake-up if the rank for which this rank waits runs on another
// processor. On the same processor it cannot run while this rank spins. The kernel often puts a
// rank that wakes up on the processor of the rank that has woken it, even where each rank could
// have its own. So each rank publishes the processor on which it waits, and a rank that spins
// compares its own with those of the others at some polls; if one is equal, it yields instead.
//
// Yields come before sleep because a wake-up takes longer than most operations. They last for a
// time, not a number, because a yield takes less than a microsecond on an idle processor, and a
// time slice on a busy one, where a rank that sleeps runs sooner.
class Backoff {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  enum class Step { kSpin, kYield, kSleep };
  static constexpr int kSpinsBeforeLook = 16;

  Backoff(int num_spins, std::chrono::microseconds yield_time)
      : num_spins_(num_spins), yield_time_(yield_time) {}

  // Begins anew, after a poll that has found work.
  void reset() {
    num_idle_ = 0;
    yields_ = false;
  }

  // Returns the step after a poll without work. `shares_processor` is called at every
  // kSpinsBeforeLook-th poll of those that spin, and returns whether to yield from now on. `now`
  // returns the time, and is called at each poll of those that do not spin.
  template <class Look, class Now>
  Step next(const Look& shares_processor, const Now& now) {
    if (num_idle_ < num_spins_) {
      ++num_idle_;
      if (num_idle_ % kSpinsBeforeLook == 0 && shares_processor()) num_idle_ = num_spins_;
      return Step::kSpin;
    }
    const TimePoint time = now();
    if (!std::exchange(yields_, true)) yields_until_ = time + yield_time_;
    return time < yields_until_ ? Step::kYield : Step::kSleep;
  }

 private:
  const int num_spins_;
  const std::chrono::microseconds yield_time_;
  int num_idle_ = 0;
  bool yields_ = false;
  TimePoint yields_until_;
};

// Returns how many processors the ranks could use when they joined, all ranks together: more than
// one rank sees if each is restricted to its own. REQUIRES: all ranks have joined.
int num_processors(const SharedState& shared);

// While it lives, counts a group with more ranks on this host than processors. Ranks of such a
// group share processors in all groups of this process: in a mesh of 2 x 2 ranks on 2 processors,
// the rank for which a rank waits in a group of 2 may need the processor of the waiting rank.
class CrowdedGroup {
 public:
  explicit CrowdedGroup(bool is_crowded);
  CrowdedGroup(const CrowdedGroup&) = delete;
  CrowdedGroup& operator=(const CrowdedGroup&) = delete;
  ~CrowdedGroup();

  // Whether this process has a group with more ranks than processors.
  static bool exists();

 private:
  const bool is_crowded_;
};

// Publishes the processor on which the calling thread of `rank` runs. It is stored only if it has
// changed, so that the ranks that read it keep it in their caches.
void publish_processor(const SharedState& shared, int rank);

// Returns whether another rank has published the processor on which the calling thread of `rank`
// runs; the other rank may have moved since then.
bool shares_processor(const SharedState& shared, int rank);

}  // namespace weft::collectives
