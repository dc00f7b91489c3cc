#pragma once

#include "shared_state.h"

namespace weft::collectives {

// The group's barrier, in two halves. Phases count up from 1 over the life of the group; a rank
// arrives at phase p+1 only after it saw phase p complete, so one counter serves all of them.
class Phases {
 public:
  Phases(const SharedState& shared, int rank) : shared_(shared), rank_(rank) {}

  // What this rank wrote to shared memory before is seen by all who see the phase complete. The
  // last one to arrive wakes the others.
  void arrive();
  // Whether all have arrived where this rank did last.
  bool is_complete() const;
  // Whether `rank` has arrived there.
  bool has_arrived(int rank) const;

 private:
  SharedState shared_;
  int rank_;
  uint64_t phase_ = 0;
};

}  // namespace weft::collectives
