#pragma once

// Detects whether the processes of the other ranks still run.

#include "shared_state.h"

#include <vector>

namespace weft::collectives {

// Returns the start time of a process in clock ticks since boot, 0 if there is no such process or
// the time cannot be read.
uint64_t process_start_time(pid_t pid);

// Whether the process with this pid and start time (0: any) has ended; a zombie counts as ended.
// False if the status of the process cannot be read now.
bool process_has_ended(pid_t pid, uint64_t start_time);

// Watches the processes of a group's ranks, except this process.
class Peers {
 public:
  // REQUIRES: all ranks have joined.
  explicit Peers(const SharedState& shared);
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;
  ~Peers();

  // Returns whether the process of `rank` has ended. Takes about a microsecond; without a pidfd,
  // some tens of microseconds.
  bool has_ended(int rank) const;

 private:
  static constexpr int kThisProcess = -3;
  static constexpr int kEndedBefore = -2;
  static constexpr int kNoPidfd = -1;  // with too many open files, for example: read /proc instead
  SharedState shared_;
  std::vector<int> descriptors_;  // by rank: a pidfd or a constant above
};

}  // namespace weft::collectives
