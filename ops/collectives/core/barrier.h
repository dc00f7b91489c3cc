#pragma once

#include "shared_state.h"

namespace weft::collectives {

// The barrier of a group, as two non-blocking calls: arrive() and is_complete(). Its uses are
// phases, numbered from 1 over the life of the group. A rank arrives at phase p + 1 only after it
// has seen phase p complete, so one shared counter of arrivals serves all phases.
class Barrier {
 public:
  Barrier(const SharedState& shared, int rank) : shared_(shared), rank_(rank) {}

  // Arrives at the next phase. Ranks that see it complete see all that this rank wrote to shared
  // memory before. The last rank to arrive wakes the others.
  void arrive();
  // Whether all ranks have arrived at the phase that this rank arrived at last.
  bool is_complete() const;
  // Whether `rank` has arrived at that phase.
  bool has_arrived(int rank) const;

 private:
  SharedState shared_;
  int rank_;
  uint64_t phase_ = 0;
};

}  // namespace weft::collectives
