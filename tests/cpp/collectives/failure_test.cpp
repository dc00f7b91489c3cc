// The errors that every rank gets when calls do not match, or when ranks are late or leave.
#include "ranks.h"
#include "reductions.h"

#include <gmock/gmock.h>

#include <mutex>

namespace weft::collectives::testing {
namespace {

using ::testing::HasSubstr;
using Values = std::vector<float>;
using MakeCall = std::function<CollectiveCall(int rank, Values& values)>;

// Returns the text of the errors that the ranks' calls throw. All must be of class Error and have
// the same text.
template <typename Error>
std::string common_text(int num_ranks, const MakeCall& make_call) {
  std::mutex mutex;
  std::vector<std::string> texts;
  run_threads(num_ranks, [&](Engine& engine, int rank) {
    Values values(256, 1.F);
    std::string text = error_text<Error>([&] { complete(engine, make_call(rank, values)); });
    {
      const std::lock_guard lock(mutex);
      texts.push_back(text);
    }
    EXPECT_EQ(error_text<Error>([&] { complete(engine, barrier_call()); }), text)
        << "the group stays failed";
  });
  for (const std::string& text : texts) EXPECT_EQ(text, texts.front());
  return texts.front();
}

CollectiveCall sum(std::vector<int64_t> shape, DType dtype, Values& values) {
  int64_t size = 1;
  for (const int64_t dim : shape) size *= dim;
  return all_reduce_call(
      {dtype, std::move(shape)}, ReduceOp::kSum, {bytes(values), size}, {bytes(values), size});
}

TEST(MismatchError, NamesTheCallOfEachRank) {
  const auto text = common_text<CollectiveMismatchError>(3, [](int rank, Values& values) {
    return rank == 1 ? barrier_call() : sum({4}, DType::kFloat32, values);
  });
  EXPECT_THAT(text,
              HasSubstr("ranks 0, 2 called all_reduce(sum, float32 [4]); rank 1 called "
                        "barrier()"));
}

TEST(MismatchError, NamesShapesOfEqualSize) {
  const auto text = common_text<CollectiveMismatchError>(2, [](int rank, Values& values) {
    return sum(rank == 0 ? std::vector<int64_t>{2, 6} : std::vector<int64_t>{3, 4},
               DType::kFloat32,
               values);
  });
  EXPECT_THAT(text,
              HasSubstr("rank 0 called all_reduce(sum, float32 [2, 6]); rank 1 called "
                        "all_reduce(sum, float32 [3, 4])"));
}

TEST(MismatchError, NamesDTypesOfEqualSize) {
  const auto text = common_text<CollectiveMismatchError>(2, [](int rank, Values& values) {
    return sum({4}, rank == 0 ? DType::kFloat32 : DType::kInt32, values);
  });
  EXPECT_THAT(text, HasSubstr("float32 [4]"));
  EXPECT_THAT(text, HasSubstr("int32 [4]"));
}

TEST(MismatchError, NamesTheRoots) {
  const auto text = common_text<CollectiveMismatchError>(2, [](int rank, Values& values) {
    return broadcast_call({DType::kFloat32, {4}}, {bytes(values), 4}, rank, rank);
  });
  EXPECT_THAT(text, HasSubstr("root 0"));
  EXPECT_THAT(text, HasSubstr("root 1"));
}

TEST(MismatchError, NamesSentAndReceivedCounts) {
  const auto text = common_text<CollectiveMismatchError>(2, [](int rank, Values& values) {
    // Rank 1 sends 6 elements, but rank 0 receives 4.
    const int64_t own = rank == 0 ? 4 : 6;
    return all_gather_call(DType::kFloat32,
                           {bytes(values), own},
                           {{bytes(values), 4}, {bytes(values), rank == 0 ? 4 : 6}});
  });
  EXPECT_THAT(text, HasSubstr("sends [6, 6], receives [4, 6]"));
}

TEST(MismatchError, NamesTheTensorOfACoalescedCall) {
  // Tensor 3 of a coalesced call on rank 0 meets a single call of the same shape on rank 1.
  const auto text = common_text<CollectiveMismatchError>(2, [](int rank, Values& values) {
    CollectiveCall call = sum({4}, DType::kFloat32, values);
    call.header.position = rank == 0 ? 2 : 0;
    call.header.num_coalesced = rank == 0 ? 3 : 1;
    return call;
  });
  EXPECT_THAT(text,
              HasSubstr("rank 0 called all_reduce(sum, float32 [4], tensor 3 of 3); rank 1 "
                        "called all_reduce(sum, float32 [4])"));
}

TEST(MismatchError, ShortensShapesOfManyDims) {
  const auto text = common_text<CollectiveMismatchError>(2, [](int rank, Values& values) {
    return sum(rank == 0 ? std::vector<int64_t>{1, 1, 1, 1, 1, 2, 6}
                         : std::vector<int64_t>{1, 1, 1, 1, 1, 3, 4},
               DType::kFloat32,
               values);
  });
  EXPECT_THAT(text, HasSubstr("float32 [1, 1, 1, 1, 1] and 2 more dims, 12 elements"));
}

TEST(MismatchError, NamesSparseDims) {
  const auto text = common_text<CollectiveMismatchError>(3, [](int rank, Values& values) {
    if (rank == 0) return sum({6, 2}, DType::kFloat32, values);
    return sparse_all_reduce_call(
        {DType::kFloat32, {6, 2}}, rank, rank, {}, [](const std::vector<int64_t>& counts) {
          return std::vector<Output>(counts.size());
        });
  });
  EXPECT_THAT(text, HasSubstr("rank 0 called all_reduce(sum, float32 [6, 2])"));
  EXPECT_THAT(text,
              HasSubstr("rank 1 called sparse_all_reduce(sum, float32 [6, 2], 1 sparse dim)"));
  EXPECT_THAT(text,
              HasSubstr("rank 2 called sparse_all_reduce(sum, float32 [6, 2], 2 sparse dims)"));
}

TEST(MismatchError, NamesEightBitFormats) {
  const auto text = common_text<CollectiveMismatchError>(2, [](int rank, Values& values) {
    const DType dtype = rank == 0 ? DType::kFloat8E4M3FN : DType::kFloat8E5M2;
    return broadcast_call({dtype, {4}}, {bytes(values), 4}, 0, rank);
  });
  EXPECT_THAT(text, HasSubstr("float8_e4m3fn"));
  EXPECT_THAT(text, HasSubstr("float8_e5m2 "));
}

TEST(MismatchError, NamesTheDTypesOfAMessage) {
  run_threads(2, [](Engine& engine, int rank) {
    Values values(4);
    const auto direction = rank == 0 ? Message::Direction::kSend : Message::Direction::kReceive;
    const auto call = std::make_shared<Message>(
        direction, 1 - rank, 0, rank == 0 ? DType::kFloat32 : DType::kInt32, 4, bytes(values));
    // A small message is sent before the receiver checks it.
    const auto text = error_text<CollectiveMismatchError>([&] {
      complete(engine, call);
      complete(engine, barrier_call());
    });
    EXPECT_THAT(text, HasSubstr("rank 0 sent float32 4 elements"));
    EXPECT_THAT(text, HasSubstr("recv(int32 4 elements from rank 0"));
  });
}

TEST(MismatchError, NamesTheSizesOfAMessage) {
  run_threads(2, [](Engine& engine, int rank) {
    Values values(100000);
    const auto direction = rank == 0 ? Message::Direction::kSend : Message::Direction::kReceive;
    const auto call = std::make_shared<Message>(
        direction, 1 - rank, 0, DType::kFloat32, rank == 0 ? 100000 : 4, bytes(values));
    const auto text = error_text<CollectiveMismatchError>([&] { complete(engine, call); });
    EXPECT_THAT(text,
                HasSubstr("rank 0 sent float32 100000 elements with tag 0 where rank 1 called "
                          "recv(float32 4 elements from rank 0, tag 0)"));
  });
}

TEST(Timeout, TheErrorListsArrivedAndMissingRanks) {
  std::atomic<bool> is_over{false};
  run_threads(
      3,
      [&](Engine& engine, int rank) {
        Values values(4);
        if (rank == 2) {
          while (!is_over) std::this_thread::sleep_for(milliseconds(1));
          EXPECT_NE(error_text<CollectiveTimeoutError>([&] { complete(engine, barrier_call()); }),
                    "");
          return;
        }
        const auto text = error_text<CollectiveTimeoutError>(
            [&] { complete(engine, sum({4}, DType::kFloat32, values)); });
        EXPECT_THAT(text, HasSubstr("all_reduce(sum, float32 [4]) of group 'test' timed out"));
        EXPECT_THAT(text, HasSubstr("not arrived rank 2"));
        is_over = true;
      },
      group_of(1, 0, milliseconds(300)));
}

// An operation that is queued behind another has its own timeout, whichever thread drives the
// group.
TEST(Timeout, EveryWaitHasItsOwnTimeout) {
  for (const bool is_driven_elsewhere : {false, true}) {
    std::atomic<bool> is_over{false};
    run_threads(2, [&](Engine& engine, int rank) {
      if (rank == 1) {
        while (!is_over) std::this_thread::sleep_for(milliseconds(1));
        return;
      }
      Values values(4);
      const auto first = engine.make(barrier_call());
      const auto second = engine.make(sum({4}, DType::kFloat32, values));
      engine.submit(first, false);
      engine.submit(second, false);
      std::thread driver;
      if (is_driven_elsewhere) {
        driver = std::thread([&] { engine.wait(*first, milliseconds(0)); });
        std::this_thread::sleep_for(milliseconds(50));
      }
      const auto text = error_text<CollectiveTimeoutError>([&] {
        engine.wait(*second, milliseconds(200));
        std::rethrow_exception(second->error());
      });
      EXPECT_THAT(text,
                  HasSubstr("all_reduce(sum, float32 [4]) of group 'test' timed out after 0.2 s "
                            "on rank 0, behind barrier() (collective 1 of the group): arrived "
                            "rank 0"));
      EXPECT_THAT(text, HasSubstr("not arrived rank 1"));
      if (driver.joinable()) driver.join();
      is_over = true;
    });
  }
}

// A waiting rank yields its processor; another thread may then occupy the processor for a full time
// slice.
TEST(Timeout, ABusyMachineDoesNotDelayTheTimeout) {
  std::atomic<bool> is_over{false};
  std::vector<std::thread> busy;
  for (unsigned i = 0; i < 2 * std::thread::hardware_concurrency(); ++i) {
    busy.emplace_back([&] {
      while (!is_over) pause();
    });
  }
  std::atomic<int> num_timed_out{0};
  run_threads(
      4,
      [&](Engine& engine, int rank) {
        const auto start = std::chrono::steady_clock::now();
        while (rank == 0 && num_timed_out < 3 &&
               std::chrono::steady_clock::now() - start < milliseconds(1000)) {
          std::this_thread::sleep_for(milliseconds(1));
        }
        EXPECT_NE(error_text<CollectiveTimeoutError>([&] { complete(engine, barrier_call()); }),
                  "");
        ++num_timed_out;
      },
      group_of(1, 0, milliseconds(100)));
  is_over = true;
  for (std::thread& thread : busy) thread.join();
}

TEST(Timeout, ARankThatNeverJoinsIsNamed) {
  MemoryStore store;
  GroupOptions options = group_of(2, 0, milliseconds(200));
  EXPECT_THAT(error_text<CollectiveTimeoutError>([&] { join_group(store.view(), options, {}); }),
              HasSubstr("rank 1 did not join group 'test' within 0.2 s"));
}

TEST(Leave, PeersThatNeedTheRankRaisePeerLostError) {
  run_threads(2, [](Engine& engine, int rank) {
    complete(engine, barrier_call());
    if (rank == 1) return;  // leaves
    const auto text = error_text<PeerLostError>([&] { complete(engine, barrier_call()); });
    EXPECT_THAT(text, HasSubstr("rank 1"));
    EXPECT_THAT(text, HasSubstr("left the group"));
  });
}

// Ranks may leave when they are done; a receive from any source works as long as one peer remains.
TEST(Leave, AReceiveFromAnySourceNeedsOneRemainingPeer) {
  std::atomic<int> num_received{0};
  run_threads(3, [&](Engine& engine, int rank) {
    Values values(100, static_cast<float>(rank));
    const auto receive = [&] {
      const auto message = std::make_shared<Message>(
          Message::Direction::kReceive, kAnySource, 0, DType::kFloat32, 100, bytes(values));
      complete(engine, message);
      ++num_received;
      return message->source();
    };
    if (rank != 0) {
      while (rank == 2 && num_received < 1) std::this_thread::sleep_for(milliseconds(1));
      if (rank == 2) std::this_thread::sleep_for(milliseconds(200));  // until rank 1 has left
      const auto send = std::make_shared<Message>(
          Message::Direction::kSend, 0, 0, DType::kFloat32, 100, bytes(values));
      return complete(engine, send);
    }
    EXPECT_EQ(receive(), 1);
    EXPECT_EQ(receive(), 2);
    EXPECT_EQ(values.front(), 2.F);
    EXPECT_THAT(error_text<PeerLostError>(receive), HasSubstr("left the group"));
  });
}

TEST(Leave, PendingOperationsFail) {
  run_threads(2, [](Engine& engine, int rank) {
    if (rank == 0) {
      Values values(4);
      const auto pending = std::make_shared<Message>(
          Message::Direction::kReceive, 1, 0, DType::kFloat32, 4, bytes(values));
      engine.submit(pending, true);
      engine.leave();
      EXPECT_NE(error_text<GroupAbortedError>([&] {
                  engine.wait(*pending, milliseconds(0));
                  std::rethrow_exception(pending->error());
                }),
                "");
      EXPECT_THAT(error_text<GroupAbortedError>([&] { complete(engine, barrier_call()); }),
                  HasSubstr("which this rank has left"));
    }
  });
}

TEST(Abort, ReachesAllRanks) {
  run_threads(3, [](Engine& engine, int rank) {
    if (rank == 0) engine.abort("enough");
    EXPECT_THAT(error_text<GroupAbortedError>([&] { complete(engine, barrier_call()); }),
                HasSubstr("rank 0 aborted group 'test': enough"));
  });
}

}  // namespace
}  // namespace weft::collectives::testing
