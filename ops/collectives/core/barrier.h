#pragma once

#include "shared_state.h"

namespace weft::collectives {

// The barrier of a group, as two non-blocking calls: arrive() and is_complete(). Each use of the
// barrier is a phase; phases are numbered from 1 over the life of the group. A rank arrives at
// phase p + 1 only after it has seen phase p complete, so one shared counter of arrivals serves all
// phases.
class Barrier {
 public:
  Barrier(const SharedState& shared, int rank) : shared_(shared), rank_(rank) {}

  // Arrives at the next phase. Ranks that see the phase complete see all that this rank wrote to
  // shared memory before it arrived. The last rank to arrive wakes the others.
  void arrive();
  // Whether all ranks have arrived at the current phase, that of this rank's latest arrive().
  bool is_complete() const;
  // Whether `rank` has arrived at the current phase.
  bool has_arrived(int rank) const;

 private:
  SharedState shared_;
  int rank_;
  uint64_t phase_ = 0;
};

}  // namespace weft::collectives
