#pragma once

// The steps of a waiting rank between two polls: it spins, then yields its processor, then sleeps.

#include "shared_state.h"

namespace weft::collectives {

// Spinning is cheaper than a wake-up if the rank for which this rank waits runs on another
// processor. On the same processor it cannot run while this rank spins. The kernel often puts a
// rank that wakes up on the processor of the rank that has woken it, even where each rank could
// have its own. So each rank publishes the processor on which it waits, and a rank that spins
// compares its own with those of the others at some polls; if one is equal, it yields instead.
//
// Yields come before sleep because a wake-up takes longer than most operations.
class Backoff {
 public:
  enum class Step { kSpin, kYield, kSleep };
  static constexpr int kSpinsBeforeLook = 16;

  Backoff(int num_spins, int num_yields) : num_spins_(num_spins), num_yields_(num_yields) {}

  // Begins anew, after a poll that has found work.
  void reset() { num_idle_ = 0; }

  // Returns the step after a poll without work. `shares_processor` is called at every
  // kSpinsBeforeLook-th poll of those that spin, and returns whether to yield from now on.
  template <class Look>
  Step next(const Look& shares_processor) {
    if (num_idle_ < num_spins_) {
      ++num_idle_;
      if (num_idle_ % kSpinsBeforeLook == 0 && shares_processor()) num_idle_ = num_spins_;
      return Step::kSpin;
    }
    if (num_idle_ < num_spins_ + num_yields_) {
      ++num_idle_;
      return Step::kYield;
    }
    return Step::kSleep;
  }

 private:
  const int num_spins_;
  const int num_yields_;
  int num_idle_ = 0;
};

// Publishes the processor on which the calling thread of `rank` runs. It is stored only if it has
// changed, so that the ranks that read it keep it in their caches.
void publish_processor(const SharedState& shared, int rank);

// Returns whether another rank has published the processor on which the calling thread of `rank`
// runs; the other rank may have moved since then.
bool shares_processor(const SharedState& shared, int rank);

}  // namespace weft::collectives
