#pragma once

// Whether the processes of the other ranks still run.

#include "shared_state.h"

#include <vector>

namespace weft::collectives {

// The start time of a process in clock ticks since the system came up, 0 where there is none or it
// cannot be found out.
uint64_t process_start_time(pid_t pid);

// Whether the process that started then (0: whenever) runs no more: it is gone, or its parent has
// yet to ask for its status. False where that cannot be found out now.
bool process_has_ended(pid_t pid, uint64_t start_time);

// Watches the processes that have joined. Ranks of this very process are not watched.
class Peers {
 public:
  // REQUIRES: all ranks have joined.
  explicit Peers(const SharedState& shared);
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;
  ~Peers();

  // About a microsecond; some tens where the system gives no descriptor of a process.
  bool has_ended(int rank) const;

 private:
  static constexpr int kThisProcess = -3;
  static constexpr int kEndedBefore = -2;
  static constexpr int kNone = -1;  // too many files are open, say: /proc tells, too
  SharedState shared_;
  std::vector<int> descriptors_;  // pidfds, by rank
};

}  // namespace weft::collectives
