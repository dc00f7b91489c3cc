#include "slow_network.h"

#include <gtest/gtest.h>

namespace weft::collectives {
namespace {

using c10d::OpType;

// Hosts of two ranks; a message takes 1 s, and a byte 0.001 s.
constexpr ops::SlowNetwork kNetwork = {
    .ranks_per_host = 2, .seconds_per_message = 1, .bytes_per_second = 1000};

double seconds_of(OpType op_type,
                  int64_t num_bytes,
                  const std::vector<uint64_t>& ranks,
                  int rank = 0,
                  int peer = -1) {
  const auto time =
      network_time(kNetwork, ranks, rank, static_cast<int>(ranks.size()), op_type, num_bytes, peer);
  return std::chrono::duration<double>(time).count();
}

TEST(SlowNetwork, RingsSendAShareOfTheBytesInEachMessage) {
  // Four ranks on two hosts, whose two ranks send at the same time.
  EXPECT_DOUBLE_EQ(seconds_of(OpType::_ALLGATHER_BASE, 4000, {0, 1, 2, 3}), 3 * (1 + 0.5));
  EXPECT_DOUBLE_EQ(seconds_of(OpType::_REDUCE_SCATTER_BASE, 4000, {0, 1, 2, 3}), 3 * (1 + 0.5));
  EXPECT_DOUBLE_EQ(seconds_of(OpType::ALLREDUCE, 4000, {0, 1, 2, 3}), 6 * (1 + 0.5));
  EXPECT_DOUBLE_EQ(seconds_of(OpType::BARRIER, 0, {0, 1, 2, 3}), 3);
  // One rank of each of two hosts.
  EXPECT_DOUBLE_EQ(seconds_of(OpType::ALLREDUCE, 4000, {1, 3}, 1), 2 * (1 + 2));
}

TEST(SlowNetwork, CallsWithinAHostTakeNoTime) {
  EXPECT_EQ(seconds_of(OpType::ALLREDUCE, 4000, {2, 3}), 0);
  EXPECT_EQ(seconds_of(OpType::RECV, 4000, {0, 1, 2}, 0, 1), 0);
}

TEST(SlowNetwork, ReceivesTakeOneMessage) {
  EXPECT_DOUBLE_EQ(seconds_of(OpType::RECV, 4000, {0, 1, 2}, 0, 2), 1 + 4);
  EXPECT_EQ(seconds_of(OpType::SEND, 4000, {0, 1, 2}, 2, 0), 0);
}

TEST(SlowNetwork, RanksOfAGroupWithoutGlobalRanksAreGlobal) {
  const auto time = network_time(kNetwork, {}, 3, 4, OpType::ALLREDUCE, 4000);
  EXPECT_DOUBLE_EQ(std::chrono::duration<double>(time).count(), 6 * (1 + 0.5));
}

}  // namespace
}  // namespace weft::collectives
