#pragma once

// The use of a transport's tags, which have 31 bits, as in gloo and MPI.

#include <cstdint>

namespace weft::collectives {

// The tag of all steps of collectives, which have the same order on all ranks.
constexpr int kCollectiveTag = 0;
// The tag of the header of a message with a user tag from 0 to kMaxUserTag; other user tags raise
// std::invalid_argument.
constexpr int kMaxUserTag = (1 << 30) - 2;
constexpr int header_tag(int user_tag) { return user_tag + 1; }
// The tag of the data of a sender's message `k` (from 0) to a receiver.
constexpr int data_tag(uint64_t k) { return (1 << 30) + static_cast<int>(k % ((1U << 30) - 1)); }
// The tag of receives that only probe a connection: no rank sends with it.
constexpr int kProbeTag = 2147483647;

}  // namespace weft::collectives
