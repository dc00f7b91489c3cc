#pragma once

// What the tags of a transport are used for: 31 bits, as gloo and MPI take them.

#include <cstdint>

namespace weft::collectives {

// Steps of collectives, in the order that they have on all ranks.
constexpr int kCollectiveTag = 0;
// The head of a message of user tag t; larger user tags are refused.
constexpr int kMaxUserTag = (1 << 30) - 2;
constexpr int head_tag(int user_tag) { return user_tag + 1; }
// The data of the sender's k-th message to a receiver.
constexpr int data_tag(uint64_t k) { return (1 << 30) + static_cast<int>(k % ((1U << 30) - 1)); }
// The tag of receives that no rank ever sends to.
constexpr int kProbeTag = 2147483647;

}  // namespace weft::collectives
