#pragma once

// The time that calls would take on a slow network: see ops::BackendOptions::slow_network.

#include <weft/ops/backend.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

namespace weft::collectives {

// Returns the time of a call of a rank of a group, by ring algorithms: each rank sends (n - 1) / n
// of the bytes in n - 1 messages, and twice that for an all-reduce. Zero within a host. A receive
// takes one message; a send takes no time, because the receive that it matches does.
//
// global_ranks: by rank of the group; empty: a rank's number is its global rank. num_bytes: of the
// full tensor, such as what an all-gather returns. peer: the sender of a receive, else -1.
std::chrono::nanoseconds network_time(const ops::SlowNetwork& network,
                                      const std::vector<uint64_t>& global_ranks,
                                      int rank,
                                      int size,
                                      c10d::OpType op_type,
                                      int64_t num_bytes,
                                      int peer = -1);

// The pretended link of this process, which is one rank. Calls of all groups take turns on it.
class PretendedLink {
 public:
  static PretendedLink& instance();

  // Returns when a call ends whose data may be sent from now on, and takes that much time.
  std::chrono::steady_clock::time_point send(std::chrono::nanoseconds time);

 private:
  std::mutex mutex_;
  std::chrono::steady_clock::time_point free_from_;
};

}  // namespace weft::collectives
