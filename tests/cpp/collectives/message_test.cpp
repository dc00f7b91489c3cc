// Point-to-point messages: any order, any size, both ways at once.
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

void wait_for(Engine& engine, const MessagePtr& message) {
  engine.wait(*message, milliseconds(0));
  if (message->error()) std::rethrow_exception(message->error());
}

class MessageSizes : public ::testing::TestWithParam<size_t> {};

TEST_P(MessageSizes, BothWaysAtOnceWithoutDeadlock) {
  run_threads(2, [&](Engine& engine, int rank) {
    Ints sent = pattern(rank, GetParam());
    Ints received(GetParam());
    const auto send = message(Direction::kSend, 1 - rank, 0, sent);
    engine.submit(send, true);
    complete(engine, message(Direction::kReceive, 1 - rank, 0, received));
    wait_for(engine, send);
    EXPECT_EQ(received, pattern(1 - rank, GetParam()));
    complete(engine, make_barrier());
  });
}

TEST_P(MessageSizes, ReceivedInTheOtherOrder) {
  run_threads(2, [&](Engine& engine, int rank) {
    std::vector<Ints> values;
    for (int tag = 0; tag < 5; ++tag) {
      values.push_back(rank == 0 ? pattern(tag, GetParam()) : Ints(GetParam()));
    }
    if (rank == 0) {
      std::vector<MessagePtr> sends;
      for (int tag = 0; tag < 5; ++tag) {
        sends.push_back(message(Direction::kSend, 1, tag, values[static_cast<size_t>(tag)]));
        engine.submit(sends.back(), true);
      }
      for (const MessagePtr& send : sends) wait_for(engine, send);
    } else {
      for (int tag = 4; tag >= 0; --tag) {
        Ints& received = values[static_cast<size_t>(tag)];
        complete(engine, message(Direction::kReceive, 0, tag, received));
        EXPECT_EQ(received, pattern(tag, GetParam()));
      }
    }
    complete(engine, make_barrier());
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, MessageSizes, ::testing::Values(0, 1, 1016, 1017, 70000, 1000003));

TEST(MessageTest, OneTagKeepsItsOrder) {
  run_threads(2, [](Engine& engine, int rank) {
    for (int i = 0; i < 200; ++i) {
      Ints values = rank == 0 ? pattern(i, 3) : Ints(3);
      complete(engine,
               message(rank == 0 ? Direction::kSend : Direction::kReceive, 1 - rank, 7, values));
      EXPECT_EQ(values, pattern(i, 3));
    }
    complete(engine, make_barrier());
  });
}

TEST(MessageTest, FromAnyRankTellsWhich) {
  run_threads(4, [](Engine& engine, int rank) {
    if (rank == 0) {
      std::vector<int> sources;
      for (int i = 0; i < 3; ++i) {
        Ints values(5000);
        const auto receive = message(Direction::kReceive, kAnySource, 1, values);
        complete(engine, receive);
        sources.push_back(receive->source());
        EXPECT_EQ(values, pattern(receive->source(), 5000));
      }
      std::ranges::sort(sources);
      EXPECT_EQ(sources, (std::vector<int>{1, 2, 3}));
    } else {
      Ints values = pattern(rank, 5000);
      complete(engine, message(Direction::kSend, 0, 1, values));
    }
    complete(engine, make_barrier());
  });
}

// A collective that comes between does not hold up a message that the other side needs first.
TEST(MessageTest, ASendGoesOnWhileItsRankWaitsInACollective) {
  run_threads(2, [](Engine& engine, int rank) {
    Ints values = rank == 0 ? pattern(5, 500000) : Ints(500000);
    if (rank == 0) {
      const auto send = message(Direction::kSend, 1, 0, values);
      engine.submit(send, true);
      complete(engine, make_barrier());
      wait_for(engine, send);
    } else {
      complete(engine, message(Direction::kReceive, 0, 0, values));
      complete(engine, make_barrier());
      EXPECT_EQ(values, pattern(5, 500000));
    }
  });
}

TEST(MessageTest, RandomTrafficBetweenFourRanks) {
  constexpr int kRounds = 60;
  run_threads(4, [](Engine& engine, int rank) {
    std::mt19937 plan(11);  // the same on every rank
    std::mt19937 own(static_cast<unsigned>(rank));
    for (int round = 0; round < kRounds; ++round) {
      struct Transfer {
        int from, to, tag;
        size_t size;
      };
      std::vector<Transfer> transfers;
      for (int i = 0; i < 8; ++i) {
        const int from = static_cast<int>(plan() % 4);
        const int to = (from + 1 + static_cast<int>(plan() % 3)) % 4;
        transfers.push_back({from, to, i, plan() % 20000});
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
        engine.submit(pending.back(), true);
      }
      for (const MessagePtr& each : pending) wait_for(engine, each);
      for (size_t i = 0; i < transfers.size(); ++i) {
        const Transfer& t = transfers[i];
        if (t.to != rank) continue;
        EXPECT_EQ(buffers[i], pattern(round * 8 + t.tag, t.size));
      }
    }
    complete(engine, make_barrier());
  });
}

}  // namespace
}  // namespace weft::collectives::testing
