#pragma once

// Whether the processes of the other ranks still run.

#include "shared_state.h"

#include <vector>

namespace weft::collectives {

// The start time of a process in clock ticks since the system came up, 0 where there is none.
uint64_t process_start_time(pid_t pid);

// Watches the processes that have joined. Ranks of this very process are not watched.
class Peers {
 public:
  // REQUIRES: all ranks have joined.
  explicit Peers(const SharedState& shared);
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;
  ~Peers();

  // About a microsecond.
  bool has_ended(int rank) const;

 private:
  static constexpr int kThisProcess = -2;
  static constexpr int kEndedBefore = -1;
  std::vector<int> descriptors_;  // pidfds, by rank
};

}  // namespace weft::collectives
