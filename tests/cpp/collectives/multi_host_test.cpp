// Behaviour that is specific to multi-host groups. The results of collectives and messages are
// tested in exchange_test.cpp and message_test.cpp.
#include "convert.h"
#include "ranks.h"

#include <gmock/gmock.h>

#include <atomic>
#include <bit>
#include <cmath>

namespace weft::collectives::testing {
namespace {

using ::testing::HasSubstr;
using Values = std::vector<float>;

CollectiveCall sum(Values& values) {
  return all_reduce_call({DType::kFloat32, {static_cast<int64_t>(values.size())}},
                         ReduceOp::kSum,
                         input(values),
                         output(values));
}

TEST(HostLayoutTest, HostsAreInTheOrderOfTheirLowestRanks) {
  const HostLayout layout({"x", "b", "x", "a", "b"}, 4);
  EXPECT_EQ(layout.num_hosts(), 3);
  EXPECT_EQ(layout.ranks_by_host, (std::vector<std::vector<int>>{{0, 2}, {1, 4}, {3}}));
  EXPECT_EQ(layout.own_host(), 1);
  EXPECT_EQ(layout.leader_of(2), 3);
  EXPECT_EQ(layout.local_rank_of(4), 1);
  EXPECT_FALSE(layout.is_leader());
  EXPECT_TRUE(layout.is_local(1));
  EXPECT_FALSE(layout.is_local(0));
}

// Values whose sum depends on the order of the additions.
Values fractions(int rank, size_t size) {
  Values values(size);
  for (size_t i = 0; i < size; ++i) {
    values[i] = std::sin(static_cast<float>(i + 1) * static_cast<float>(rank + 1)) *
                std::ldexp(1.F, rank * 3);
  }
  return values;
}

class MultiHostSum : public ::testing::TestWithParam<size_t> {};
// Sizes that are sent as one message, as one segment per leader, and in several chunks.
INSTANTIATE_TEST_SUITE_P(Sizes, MultiHostSum, ::testing::Values(5, 40000, 2200000));

TEST_P(MultiHostSum, AddsTheSumsOfTheHostsInHostOrder) {
  const size_t size = GetParam();
  const std::string hosts = "abcab";
  Values expected(size, 0.F);
  for (size_t i = 0; i < size; ++i) {
    const auto at = [&](int rank) {
      return std::sin(static_cast<float>(i + 1) * static_cast<float>(rank + 1)) *
             std::ldexp(1.F, rank * 3);
    };
    expected[i] = (at(0) + at(3)) + (at(1) + at(4)) + at(2);
  }
  run_on_hosts(hosts, [&](Group& group, int rank) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      Values values = fractions(rank, size);
      complete(group, sum(values));
      EXPECT_EQ(values, expected);
    }
  });
}

// 256 + 1 is 256 in bfloat16, so partial sums in that type would lose the ones.
TEST(HalfTypes, AreRoundedOnce) {
  run_on_hosts("abb", [](Group& group, int rank) {
    const Values wide(3, rank == 0 ? 256.F : 1.F);
    std::vector<uint16_t> values(3);
    narrow(DType::kBFloat16, reinterpret_cast<const std::byte*>(wide.data()), bytes(values), 3);
    complete(
        group,
        all_reduce_call({DType::kBFloat16, {3}}, ReduceOp::kSum, input(values), output(values)));
    Values result(3);
    widen(DType::kBFloat16, bytes(values), bytes(result), 3);
    EXPECT_EQ(result, Values(3, 258.F));

    std::vector<uint16_t> mine(1);
    std::vector<Input> inputs;
    narrow(DType::kBFloat16, reinterpret_cast<const std::byte*>(wide.data()), bytes(values), 3);
    for (size_t i = 0; i < 3; ++i) {
      inputs.push_back({reinterpret_cast<const std::byte*>(&values[i]), 1});
    }
    complete(group,
             reduce_scatter_call(DType::kBFloat16, ReduceOp::kAvg, inputs, output(mine), rank));
    widen(DType::kBFloat16, bytes(mine), bytes(result), 1);
    EXPECT_EQ(result[0], 86.F);
  });
}

TEST(Integers, AverageOverAllRanksAndTruncate) {
  run_on_hosts("aab", [](Group& group, int rank) {
    std::vector<int64_t> values{rank == 2 ? 3 : 1, -5};
    complete(group,
             all_reduce_call({DType::kInt64, {2}}, ReduceOp::kAvg, input(values), output(values)));
    EXPECT_EQ(values, (std::vector<int64_t>{1, -5}));
    const std::vector<int64_t> before{rank + 1, 7};
    values = before;
    complete(group,
             reduce_call(
                 {DType::kInt64, {2}}, ReduceOp::kProduct, input(values), output(values), 1, rank));
    EXPECT_EQ(values, rank == 1 ? (std::vector<int64_t>{6, 343}) : before) << "only on the root";
  });
}

class OnDone : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Hosts, OnDone, ::testing::Values("aa", "ab"));

// Waiting for the operation whose on_done runs on this thread must not deadlock.
TEST_P(OnDone, MayWaitForItsOwnOperationAndOthers) {
  run_on_hosts(GetParam(), [](Group& group, int rank) {
    Values values(3, static_cast<float>(rank));
    const auto wait_for_itself = [&](const OperationPtr& operation, bool* is_over) {
      operation->on_done = [&, is_over, it = operation.get()](const std::exception_ptr& error) {
        EXPECT_FALSE(error);
        group.wait(*it, milliseconds(0));
        *is_over = true;
      };
      complete(group, operation);
    };
    bool message_is_over = false;
    wait_for_itself(std::make_shared<Message>(
                        rank == 0 ? Message::Direction::kSend : Message::Direction::kReceive,
                        1 - rank,
                        7,
                        DType::kFloat32,
                        3,
                        bytes(values)),
                    &message_is_over);
    EXPECT_TRUE(message_is_over);
    EXPECT_EQ(values, Values(3, 0.F));

    bool sum_is_over = false;
    values.assign(3, static_cast<float>(rank + 1));
    wait_for_itself(group.make(sum(values)), &sum_is_over);
    EXPECT_TRUE(sum_is_over);
    EXPECT_EQ(values, Values(3, 3.F));

    // A message's on_done waits for a collective that the group's own thread executes.
    const auto later = group.make(sum(values));
    bool later_was_done = false;
    const auto message = std::make_shared<Message>(
        rank == 0 ? Message::Direction::kSend : Message::Direction::kReceive,
        1 - rank,
        8,
        DType::kFloat32,
        0,
        nullptr);
    message->on_done = [&](const std::exception_ptr& /*error*/) {
      group.wait(*later, milliseconds(0));
      later_was_done = later->is_done();
    };
    group.submit(later, false);
    group.submit(message, false);
    group.wait(*message, milliseconds(0));
    EXPECT_TRUE(later_was_done);
    EXPECT_EQ(values, Values(3, 6.F));
  });
}

TEST(MultiHostFailure, AMismatchIsTheSameErrorOnAllHosts) {
  std::mutex mutex;
  std::vector<std::string> texts;
  run_on_hosts("aabb", [&](Group& group, int rank) {
    Values values(rank == 3 ? 6U : 4U);
    const auto text = error_text<CollectiveMismatchError>([&] { complete(group, sum(values)); });
    EXPECT_EQ(error_text<CollectiveMismatchError>([&] { complete(group, barrier_call()); }), text);
    const std::lock_guard lock(mutex);
    texts.push_back(text);
  });
  EXPECT_THAT(texts.front(),
              HasSubstr("ranks 0, 1, 2 called all_reduce(sum, float32 [4]); rank 3 called "
                        "all_reduce(sum, float32 [6])"));
  for (const std::string& text : texts) {
    EXPECT_EQ(text.substr(text.rfind("ranks 0, 1, 2")),
              texts.front().substr(texts.front().rfind("ranks 0, 1, 2")));
  }
}

TEST(MultiHostFailure, AMessageOfAnotherSizeFailsBothSides) {
  run_on_hosts("ab", [](Group& group, int rank) {
    Values values(rank == 0 ? 4U : 5U);
    const auto message = std::make_shared<Message>(
        rank == 0 ? Message::Direction::kSend : Message::Direction::kReceive,
        1 - rank,
        7,
        DType::kFloat32,
        static_cast<int64_t>(values.size()),
        bytes(values));
    // The send may complete before the receiver finds the mismatch.
    const auto text = error_text<CollectiveMismatchError>([&] {
      complete(group, message);
      if (rank == 0) complete(group, barrier_call());
    });
    EXPECT_THAT(text,
                HasSubstr("rank 0 sent float32 4 elements with tag 7 where rank 1 called "
                          "recv(float32 5 elements"));
    EXPECT_EQ(error_text<CollectiveMismatchError>([&] { complete(group, barrier_call()); }), text);
  });
}

TEST(MultiHostFailure, ALateRankIsNamedOnTheOtherHostsToo) {
  std::atomic<int> num_failed{0};
  run_on_hosts(
      "aabb",
      [&](Group& group, int rank) {
        const auto start = std::chrono::steady_clock::now();
        while (rank == 3 && num_failed < 3 &&
               std::chrono::steady_clock::now() - start < milliseconds(10000)) {
          std::this_thread::sleep_for(milliseconds(1));
        }
        Values values(4);
        const auto text = error_text<CollectiveTimeoutError>([&] { complete(group, sum(values)); });
        EXPECT_THAT(text, HasSubstr("all_reduce(sum, float32 [4]), collective 1"));
        EXPECT_THAT(text, HasSubstr("not arrived rank 1 (global rank 3"));
        ++num_failed;
      },
      group_of(1, 0, milliseconds(300)));
}

TEST(MultiHostFailure, AnAbortReachesRanksWaitingOnOtherHosts) {
  run_on_hosts("ab", [](Group& group, int rank) {
    if (rank == 0) {
      std::this_thread::sleep_for(milliseconds(50));
      group.abort("enough");
    }
    const auto start = std::chrono::steady_clock::now();
    EXPECT_THAT(error_text<GroupAbortedError>([&] { complete(group, barrier_call()); }),
                HasSubstr("rank 0 aborted group 'test': enough"));
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(5000));
  });
}

TEST(MultiHostFailure, AWaitWithAShorterTimeoutEndsInTime) {
  run_on_hosts("ab", [](Group& group, int rank) {
    const auto operation = group.make(barrier_call());
    if (rank == 1) std::this_thread::sleep_for(milliseconds(1000));
    if (rank == 0) {
      group.submit(operation, false);
      group.wait(*operation, milliseconds(20));
      EXPECT_THROW(std::rethrow_exception(operation->error()), CollectiveTimeoutError);
    } else {
      // The late rank may complete this barrier, as all have arrived; the next one must fail.
      EXPECT_THROW(
          {
            complete(group, operation);
            complete(group, barrier_call());
          },
          CollectiveTimeoutError);
    }
  });
}

// Like gloo's transport: a send to a lost peer stays pending, and only a new receive from that peer
// fails.
class SilentTransport final : public Transport {
 public:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_lost = false;
    std::atomic<int> num_receives = 0;
  };
  explicit SilentTransport(State& state) : state_(state) {}

  std::unique_ptr<Transfer> send(int, int, const std::byte*, size_t) override {
    return std::make_unique<Endless>(state_);
  }
  std::unique_ptr<Transfer> receive(int, int, std::byte*, size_t) override {
    const std::lock_guard lock(state_.mutex);
    ++state_.num_receives;
    if (state_.is_lost) throw std::runtime_error("lost");
    return std::make_unique<Endless>(state_);
  }

 private:
  class Endless final : public Transfer {
   public:
    explicit Endless(State& state) : state_(state) {}
    void wait(milliseconds timeout) override {
      std::unique_lock lock(state_.mutex);
      state_.changed.wait_for(lock, timeout, [&] { return is_given_up_.load(); });
      throw std::runtime_error(is_given_up_ ? "given up" : "late");
    }
    void give_up() override {
      const std::lock_guard lock(state_.mutex);
      is_given_up_ = true;
      state_.changed.notify_all();
    }
    int source() const override { return 0; }

   private:
    State& state_;
    std::atomic<bool> is_given_up_{false};
  };
  State& state_;
};

TEST(ThreadSafeTransportTest, ASendToAPeerThatRejectsTransfersIsCancelled) {
  SilentTransport::State state;
  ThreadSafeTransport transport(std::make_unique<SilentTransport>(state));
  std::atomic<bool> is_over{false};
  std::string text;
  std::thread waiting([&] {
    const auto transfer = transport.send(1, 0, nullptr, 0);
    text = error_text<TransportError>([&] {
      transport.wait_for_send(*transfer, 1, std::chrono::steady_clock::now() + milliseconds(20000));
    });
    is_over = true;
  });
  const auto probe_until = [&](const std::function<bool()>& is_enough) {
    while (!is_over && !is_enough()) {
      transport.probe();
      std::this_thread::sleep_for(milliseconds(10));
    }
  };
  probe_until([&] { return state.num_receives > 0; });
  for (int i = 0; i < 100; ++i) transport.probe();
  EXPECT_LE(state.num_receives, 3) << "the peer is probed at most once a second";
  EXPECT_FALSE(is_over) << "the peer is not lost";
  {
    const std::lock_guard lock(state.mutex);
    state.is_lost = true;
  }
  probe_until([] { return false; });
  waiting.join();
  EXPECT_EQ(text, "given up");
}

// A transport may need its peer's transport until all connections are made.
TEST(MultiHostGroupTest, NoRankReturnsBeforeAllAreConnected) {
  MemoryStore store;
  Mailboxes mailboxes;
  Identities identities;
  identities.hosts = {"a", "b"};
  std::atomic<bool> is_connected{false};
  const auto join_as = [&](int rank) {
    const MultiHostGroup group(
        store.view(), group_of(2, rank), identities, [&, rank](const std::string& /*name*/) {
          if (rank == 1) {
            std::this_thread::sleep_for(milliseconds(100));
            is_connected = true;
          }
          return std::make_unique<MailboxTransport>(mailboxes, rank);
        });
    EXPECT_TRUE(is_connected) << "rank " << rank;
  };
  std::thread other([&] { join_as(1); });
  join_as(0);
  other.join();
}

TEST(MultiHostFailure, PeersThatNeedARankThatLeftRaisePeerLostError) {
  run_on_hosts("ab", [](Group& group, int rank) {
    complete(group, barrier_call());
    if (rank == 1) return group.leave();
    EXPECT_THAT(error_text<PeerLostError>([&] { complete(group, barrier_call()); }),
                HasSubstr("rank 1 (on another host) of group 'test' left the group while rank 0"));
  });
}

TEST(MultiHostFailure, LeavingFailsPendingOperations) {
  std::atomic<bool> is_over{false};
  run_on_hosts("ab", [&](Group& group, int rank) {
    while (rank == 1 && !is_over) std::this_thread::sleep_for(milliseconds(1));
    if (rank == 1) return;
    const auto operation = group.make(barrier_call());
    group.submit(operation, false);
    group.leave();
    group.wait(*operation, milliseconds(0));
    EXPECT_TRUE(operation->error());
    EXPECT_THROW(complete(group, barrier_call()), GroupAbortedError);
    is_over = true;
  });
}

}  // namespace
}  // namespace weft::collectives::testing
