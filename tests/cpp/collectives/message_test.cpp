// Point-to-point messages in any order, of any size, in both directions at once.
#include "ranks.h"

#include <algorithm>
#include <random>

namespace weft::collectives::testing {
namespace {

using Ints = std::vector<int32_t>;
using Direction = Message::Direction;

Ints pattern(int seed, size_t size) {
  Ints values(size);
  for (size_t i = 0; i < size; ++i) values[i] = seed * 1000003 + static_cast<int32_t>(i);
  return values;
}

MessagePtr message(Direction direction, int peer, int tag, Ints& values) {
  return std::make_shared<Message>(
      direction, peer, tag, DType::kInt32, static_cast<int64_t>(values.size()), bytes(values));
}

void wait_for(Group& group, const MessagePtr& message) {
  group.wait(*message, milliseconds(0));
  if (message->error()) std::rethrow_exception(message->error());
}

class MessageSizes : public ::testing::TestWithParam<std::tuple<std::string, size_t>> {
 protected:
  std::string hosts() const { return std::get<0>(GetParam()); }
  size_t size() const { return std::get<1>(GetParam()); }
};

TEST_P(MessageSizes, SendsInBothDirectionsDoNotDeadlock) {
  run_on_hosts(hosts(), [&](Group& group, int rank) {
    Ints sent = pattern(rank, size());
    Ints received(size());
    const auto send = message(Direction::kSend, 1 - rank, 0, sent);
    group.submit(send, true);
    complete(group, message(Direction::kReceive, 1 - rank, 0, received));
    wait_for(group, send);
    EXPECT_EQ(received, pattern(1 - rank, size()));
    complete(group, barrier_call());
  });
}

TEST_P(MessageSizes, TagsMayBeReceivedInReverseOrder) {
  run_on_hosts(hosts(), [&](Group& group, int rank) {
    std::vector<Ints> values;
    for (int tag = 0; tag < 5; ++tag) {
      values.push_back(rank == 0 ? pattern(tag, size()) : Ints(size()));
    }
    if (rank == 0) {
      std::vector<MessagePtr> sends;
      for (int tag = 0; tag < 5; ++tag) {
        sends.push_back(message(Direction::kSend, 1, tag, values[static_cast<size_t>(tag)]));
        group.submit(sends.back(), true);
      }
      for (const MessagePtr& send : sends) wait_for(group, send);
    } else {
      for (int tag = 4; tag >= 0; --tag) {
        Ints& received = values[static_cast<size_t>(tag)];
        complete(group, message(Direction::kReceive, 0, tag, received));
        EXPECT_EQ(received, pattern(tag, size()));
      }
    }
    complete(group, barrier_call());
  });
}

INSTANTIATE_TEST_SUITE_P(
    Sizes,
    MessageSizes,
    ::testing::Combine(::testing::Values("aa", "ab"),
                       ::testing::Values(0, 1, 252, 253, 1016, 1017, 70000, 1000003)));

// Each test uses as many of these ranks as it needs, from the first on.
class MessageTest : public ::testing::TestWithParam<std::string> {
 protected:
  std::string first(size_t num_ranks) const { return GetParam().substr(0, num_ranks); }
};
INSTANTIATE_TEST_SUITE_P(Hosts, MessageTest, ::testing::Values("aaaa", "abab"));

TEST_P(MessageTest, MessagesOfOneTagArriveInOrder) {
  run_on_hosts(first(2), [](Group& group, int rank) {
    for (int i = 0; i < 200; ++i) {
      Ints values = rank == 0 ? pattern(i, 3) : Ints(3);
      complete(group,
               message(rank == 0 ? Direction::kSend : Direction::kReceive, 1 - rank, 7, values));
      EXPECT_EQ(values, pattern(i, 3));
    }
    complete(group, barrier_call());
  });
}

TEST_P(MessageTest, AReceiveFromAnySourceReturnsItsSource) {
  run_on_hosts(first(4), [](Group& group, int rank) {
    if (rank == 0) {
      std::vector<int> sources;
      for (int i = 0; i < 3; ++i) {
        Ints values(5000);
        const auto receive = message(Direction::kReceive, kAnySource, 1, values);
        complete(group, receive);
        sources.push_back(receive->source());
        EXPECT_EQ(values, pattern(receive->source(), 5000));
      }
      std::ranges::sort(sources);
      EXPECT_EQ(sources, (std::vector<int>{1, 2, 3}));
    } else {
      Ints values = pattern(rank, 5000);
      complete(group, message(Direction::kSend, 0, 1, values));
    }
    complete(group, barrier_call());
  });
}

// A rank that waits in a collective still sends the message that its peer needs before the
// collective.
TEST_P(MessageTest, ASendProgressesWhileItsRankWaitsInACollective) {
  run_on_hosts(first(2), [](Group& group, int rank) {
    Ints values = rank == 0 ? pattern(5, 500000) : Ints(500000);
    if (rank == 0) {
      const auto send = message(Direction::kSend, 1, 0, values);
      group.submit(send, true);
      complete(group, barrier_call());
      wait_for(group, send);
    } else {
      complete(group, message(Direction::kReceive, 0, 0, values));
      complete(group, barrier_call());
      EXPECT_EQ(values, pattern(5, 500000));
    }
  });
}

TEST_P(MessageTest, RandomTrafficBetweenFourRanksArrives) {
  constexpr int kRounds = 60;
  run_on_hosts(first(4), [](Group& group, int rank) {
    std::mt19937 same(11);  // the same on every rank
    std::mt19937 own(static_cast<unsigned>(rank));
    for (int round = 0; round < kRounds; ++round) {
      struct Transfer {
        int from, to, tag;
        size_t size;
      };
      std::vector<Transfer> transfers;
      for (int i = 0; i < 8; ++i) {
        const int from = static_cast<int>(same() % 4);
        const int to = (from + 1 + static_cast<int>(same() % 3)) % 4;
        transfers.push_back({from, to, i, same() % 20000});
      }
      std::ranges::shuffle(transfers, own);
      std::vector<Ints> buffers(transfers.size());
      std::vector<MessagePtr> pending;
      for (size_t i = 0; i < transfers.size(); ++i) {
        const Transfer& t = transfers[i];
        const int seed = round * 8 + t.tag;
        if (t.from == rank) {
          buffers[i] = pattern(seed, t.size);
          pending.push_back(message(Direction::kSend, t.to, t.tag, buffers[i]));
        } else if (t.to == rank) {
          buffers[i].resize(t.size);
          pending.push_back(message(Direction::kReceive, t.from, t.tag, buffers[i]));
        } else {
          continue;
        }
        group.submit(pending.back(), true);
      }
      for (const MessagePtr& each : pending) wait_for(group, each);
      for (size_t i = 0; i < transfers.size(); ++i) {
        const Transfer& t = transfers[i];
        if (t.to != rank) continue;
        EXPECT_EQ(buffers[i], pattern(round * 8 + t.tag, t.size));
      }
    }
    complete(group, barrier_call());
  });
}

}  // namespace
}  // namespace weft::collectives::testing
