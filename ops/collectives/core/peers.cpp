#include "peers.h"

#include <fstream>
#include <poll.h>
#include <sstream>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>

namespace weft::collectives {

uint64_t process_start_time(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');  // the name before it may hold anything
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(line.substr(name_end + 1));
  std::string skipped;
  for (int i = 0; i < 19; ++i) fields >> skipped;
  uint64_t start_time = 0;
  fields >> start_time;
  return start_time;
}

Peers::Peers(const SharedState& shared) {
  for (int rank = 0; rank < shared.num_ranks(); ++rank) {
    const RankBlock& block = shared.rank(rank);
    if (block.pid == getpid()) {
      descriptors_.push_back(kThisProcess);
      continue;
    }
    int descriptor = static_cast<int>(syscall(SYS_pidfd_open, block.pid, 0));
    if (descriptor >= 0 && process_start_time(block.pid) != block.start_time) {
      close(descriptor);  // the pid is another process's by now
      descriptor = kEndedBefore;
    }
    descriptors_.push_back(descriptor);
  }
}

Peers::~Peers() {
  for (const int descriptor : descriptors_) {
    if (descriptor >= 0) close(descriptor);
  }
}

bool Peers::has_ended(int rank) const {
  const int descriptor = descriptors_[static_cast<size_t>(rank)];
  if (descriptor < 0) return descriptor == kEndedBefore;
  pollfd polled{descriptor, POLLIN, 0};
  return poll(&polled, 1, 0) > 0 && (polled.revents & POLLIN) != 0;
}

}  // namespace weft::collectives
