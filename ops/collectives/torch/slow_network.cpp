#include "slow_network.h"

#include <algorithm>

namespace weft::collectives {

std::chrono::nanoseconds network_time(const ops::SlowNetwork& network,
                                      const std::vector<uint64_t>& global_ranks,
                                      int rank,
                                      int size,
                                      c10d::OpType op_type,
                                      int64_t num_bytes,
                                      int peer) {
  using c10d::OpType;
  const auto host_of = [&](int member) {
    const auto global =
        global_ranks.empty() ? static_cast<uint64_t>(member) : global_ranks.at(member);
    return global / static_cast<uint64_t>(network.ranks_per_host);
  };
  const auto in_seconds = [](double seconds) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double>(seconds));
  };
  const auto bytes = static_cast<double>(num_bytes);
  if (op_type == OpType::SEND) return std::chrono::nanoseconds::zero();
  if (op_type == OpType::RECV || op_type == OpType::RECVANYSOURCE) {
    const bool is_near = peer >= 0 && host_of(peer) == host_of(rank);
    return is_near ? std::chrono::nanoseconds::zero()
                   : in_seconds(network.seconds_per_message + bytes / network.bytes_per_second);
  }
  int num_near = 0;  // members of the group on this rank's host, whose links a ring uses together
  for (int member = 0; member < size; ++member) num_near += host_of(member) == host_of(rank);
  if (num_near == size) return std::chrono::nanoseconds::zero();
  const double message_seconds =
      network.seconds_per_message + bytes / size / (network.bytes_per_second * num_near);
  const bool is_all_reduce = op_type == OpType::ALLREDUCE || op_type == OpType::ALLREDUCE_COALESCED;
  return in_seconds((is_all_reduce ? 2 : 1) * (size - 1) * message_seconds);
}

PretendedLink& PretendedLink::instance() {
  static PretendedLink link;
  return link;
}

std::chrono::steady_clock::time_point PretendedLink::send(std::chrono::nanoseconds time) {
  const std::lock_guard lock(mutex_);
  free_from_ = std::max(free_from_, std::chrono::steady_clock::now()) + time;
  return free_from_;
}

}  // namespace weft::collectives
