#include "peers.h"

#include <cerrno>
#include <fstream>
#include <poll.h>
#include <sstream>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>

namespace weft::collectives {

namespace {

struct ProcessStatus {
  char state = 0;  // 0: no such process; '?': unknown
  uint64_t start_time = 0;
};

ProcessStatus status_of(pid_t pid) {
  errno = 0;
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  const bool is_read = static_cast<bool>(std::getline(file, line));
  const size_t name_end = line.rfind(')');  // the process name before it may contain ')'
  if (!is_read || name_end == std::string::npos) {
    return {errno == ENOENT || errno == ESRCH ? '\0' : '?', 0};
  }
  std::istringstream fields(line.substr(name_end + 1));
  ProcessStatus status;
  std::string skipped;
  fields >> status.state;
  for (int i = 0; i < 18; ++i) fields >> skipped;  // from field 3 (state) to 22 (start time)
  fields >> status.start_time;
  return status;
}

}  // namespace

uint64_t process_start_time(pid_t pid) { return status_of(pid).start_time; }

bool process_has_ended(pid_t pid, uint64_t start_time) {
  const ProcessStatus status = status_of(pid);
  if (status.state == '?') return false;
  const bool is_pid_reused = start_time != 0 && status.start_time != start_time;
  return is_pid_reused || status.state == 0 || status.state == 'Z' || status.state == 'X';
}

Peers::Peers(const SharedState& shared) : shared_(shared) {
  for (int rank = 0; rank < shared.num_ranks(); ++rank) {
    const RankBlock& block = shared.rank(rank);
    if (block.pid == getpid()) {
      descriptors_.push_back(kThisProcess);
      continue;
    }
    int descriptor = static_cast<int>(syscall(SYS_pidfd_open, block.pid, 0));
    if (descriptor < 0) {
      descriptor = errno == ESRCH ? kEndedBefore : kNoPidfd;
    } else if (const uint64_t start_time = process_start_time(block.pid);
               start_time != 0 && block.start_time != 0 && start_time != block.start_time) {
      close(descriptor);  // the pid has been reused
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
  if (descriptor == kNoPidfd) {
    const RankBlock& block = shared_.rank(rank);
    return process_has_ended(block.pid, block.start_time);
  }
  if (descriptor < 0) return descriptor == kEndedBefore;
  pollfd polled{descriptor, POLLIN, 0};
  return poll(&polled, 1, 0) > 0 && (polled.revents & POLLIN) != 0;
}

}  // namespace weft::collectives
