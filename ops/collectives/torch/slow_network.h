#pragma once

// The time that calls would take on a slow network: see ops::BackendOptions::slow_network.

#include <weft/ops/backend.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
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

}  // namespace weft::collectives
