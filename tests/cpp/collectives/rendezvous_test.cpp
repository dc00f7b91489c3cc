// How a group is created, and the errors that all its ranks get if it cannot be created.
#include "group_config.h"
#include "peers.h"
#include "ranks.h"

#include <gmock/gmock.h>

#include <csignal>
#include <functional>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace weft::collectives::testing {
namespace {

using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;
using Change = std::function<void(GroupOptions& options)>;

// Creates a group and returns each rank's error text; "" for a rank that succeeds. `change` edits
// each rank's options, and `view` returns each rank's view of the store.
std::vector<std::string> error_texts(
    MemoryStore& store,
    int num_ranks,
    const Change& change,
    const std::function<Store(int rank, Store store)>& view = [](int, Store store) {
      return store;
    }) {
  std::vector<std::string> texts(static_cast<size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      GroupOptions options = group_of(num_ranks, rank);
      change(options);
      texts[static_cast<size_t>(rank)] = error_text<CollectiveError>([&] {
        const auto group = join_group(view(rank, store.view()), options, {});
        complete(*group, barrier_call());
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return texts;
}

TEST(GroupConfig, DifferentStagingLimitsFailOnAllRanks) {
  MemoryStore store;
  const auto start = Clock::now();
  const auto texts = error_texts(store, 3, [](GroupOptions& options) {
    if (options.rank == 1) options.staging_limit_bytes = 4 << 20;
  });
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(2)) << "a rank waited for the timeout";
  for (const std::string& text : texts) EXPECT_EQ(text, texts.front());
  EXPECT_EQ(texts.front(),
            "weft: the ranks of group 'test' on one host have different "
            "staging_limit_bytes: ranks 0, 2 have 16777216; rank 1 has 4194304; pass the "
            "same value on every rank of a host");
}

// Groups are created one after another over one store; a slow rank may still be joining one group
// while others create the next.
TEST(Joining, ASuccessfulJoinLeavesNoKeys) {
  MemoryStore store;
  for (const size_t limit : {1, 1 << 20, 1 << 24}) {
    for (const int num_ranks : {3, 2}) {
      const auto texts = error_texts(
          store, num_ranks, [&](GroupOptions& options) { options.staging_limit_bytes = limit; });
      EXPECT_EQ(texts, std::vector<std::string>(texts.size()));
    }
  }
  EXPECT_EQ(store.num_keys(), 0U);
}

TEST(GroupConfig, StagingLimitsMayDifferBetweenHosts) {
  const HostLayout layout({"a", "a", "b"}, 0);
  std::vector<GroupConfig> configs(3);
  for (GroupConfig& each : configs) each.has_transport = true;
  configs[2].staging_limit_bytes = 1;
  EXPECT_EQ(config_mismatch(layout, configs, "g"), std::nullopt);
  configs[1].staging_limit_bytes = 1;
  EXPECT_THAT(config_mismatch(layout, configs, "g").value_or(""),
              HasSubstr("rank 0 has 0; rank 1 has 1"));
}

TEST(GroupConfig, MultiHostGroupsNeedATransportOnAllRanks) {
  const HostLayout layout({"a", "b", "a"}, 1);
  std::vector<GroupConfig> configs(3);
  configs[1].has_transport = true;
  EXPECT_THAT(config_mismatch(layout, configs, "g").value_or(""),
              HasSubstr("run on 2 hosts, and these ranks have no transport: 0, 2;"));
  EXPECT_EQ(config_mismatch(HostLayout({"a", "a", "a"}, 1), configs, "g"), std::nullopt);
}

TEST(GroupConfig, AnotherVersionIsNamedAndNotParsed) {
  const HostLayout layout({"a", "a"}, 0);
  GroupConfig own;
  own.staging_limit_bytes = 7;
  own.has_transport = true;
  const GroupConfig same = GroupConfig::parse(own.to_string());
  EXPECT_EQ(same.staging_limit_bytes, 7U);
  EXPECT_TRUE(same.has_transport);
  const GroupConfig other = GroupConfig::parse("99.0 something else");
  EXPECT_EQ(other.staging_limit_bytes, 0U);
  EXPECT_THAT(
      config_mismatch(layout, {own, other}, "g").value_or(""),
      HasSubstr("rank 0 has weft " + GroupConfig::own_version() + "; rank 1 has weft 99.0"));
}

TEST(Joining, AllRanksFailIfOneCannotOpenTheMemory) {
  MemoryStore store;
  const auto start = Clock::now();
  const auto texts = error_texts(
      store,
      3,
      [](GroupOptions&) {},
      [](int rank, Store view) {
        if (rank != 1) return view;
        // Simulates that this rank cannot see the process of rank 0.
        view.get = [get = view.get](const std::string& key, milliseconds timeout) {
          const std::string value = get(key, timeout);
          return key == "segment" && !value.starts_with("none ")
                     ? "4194303 3" + value.substr(value.find(' ', value.find(' ') + 1))
                     : value;
        };
        return view;
      });
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(2)) << "a rank waited for the timeout";
  for (const std::string& text : texts) EXPECT_EQ(text, texts.front());
  EXPECT_THAT(texts.front(),
              HasSubstr("rank 1 of group 'test' could not open the shared memory of rank 0"));
  EXPECT_THAT(texts.front(), HasSubstr("WEFT_HOST_ID"));
}

TEST(Joining, AStoreErrorIsNotReportedAsATimeout) {
  MemoryStore store;
  Store failing = store.view();
  failing.get = [get = failing.get](const std::string& key, milliseconds timeout) {
    if (key == "host/1") throw std::runtime_error("connection closed");
    return get(key, timeout);
  };
  EXPECT_EQ(error_text<GroupAbortedError>([&] { join_group(failing, group_of(2, 0), {}); }),
            "weft: rank 0 of group 'test' cannot read the key 'host/1' of rank 1 from the store "
            "(connection closed); check that the process that hosts the store still runs");
}

TEST(Joining, ATimeoutNamesTheRanksThatHaveNotJoined) {
  MemoryStore store;
  const GroupOptions options = group_of(3, 0, milliseconds(200));
  EXPECT_THAT(error_text<CollectiveTimeoutError>([&] { make_engine(store.view(), options); }),
              HasSubstr("timed out after 0.2 s; not joined: rank 1, rank 2; see what these ranks"));
}

class Child {
 public:
  Child() : pid_(fork()) {
    if (pid_ == 0) {
      pause_forever();
      _exit(0);
    }
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() { end(); }

  pid_t pid() const { return pid_; }
  // Kills the process and leaves a zombie, whose status has not been collected.
  void kill() const {
    ::kill(pid_, SIGKILL);
    siginfo_t info{};
    waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }
  void end() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  static void pause_forever() {
    for (;;) ::pause();
  }
  pid_t pid_;
};

// Sets a limit of this process, on open files or on file size, to 0 for its own lifetime.
class ZeroLimit {
 public:
  explicit ZeroLimit(decltype(RLIMIT_NOFILE) resource) : resource_(resource) {
    getrlimit(resource_, &before_);
    rlimit none = before_;
    none.rlim_cur = 0;
    setrlimit(resource_, &none);
  }
  ZeroLimit(const ZeroLimit&) = delete;
  ZeroLimit& operator=(const ZeroLimit&) = delete;
  ~ZeroLimit() { setrlimit(resource_, &before_); }

 private:
  const decltype(RLIMIT_NOFILE) resource_;
  rlimit before_{};
};

TEST(Joining, AllRanksFailIfTheMemoryCannotBeCreated) {
  MemoryStore store;
  std::vector<std::string> texts(3);
  std::vector<std::thread> threads;
  std::signal(SIGXFSZ, SIG_IGN);
  {
    const ZeroLimit size(RLIMIT_FSIZE);
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        texts[static_cast<size_t>(rank)] =
            error_text<GroupAbortedError>([&] { make_engine(store.view(), group_of(3, rank)); });
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  for (const std::string& text : texts) EXPECT_EQ(text, texts.front());
  EXPECT_THAT(texts.front(), HasSubstr("rank 0 of group 'test' could not create shared memory"));
}

// Otherwise this rank would be treated as one on another host.
TEST(Joining, AnUnreadableHostIdentityThrows) {
  const std::string usual = host_identity();
  {
    const ZeroLimit files(RLIMIT_NOFILE);
    EXPECT_THROW(host_identity(), std::system_error);
  }
  EXPECT_EQ(host_identity(), usual);
}

TEST(Joining, ARankThatEndsWhileOthersJoinIsNamed) {
  const Child child;
  MemoryStore store;
  std::thread ending([&] {
    // Simulates that `child` is rank 1, which has joined and ends before the last rank joins.
    Store view = store.view();
    const auto address = SegmentAddress::parse(view.get("segment", milliseconds(5000)));
    const Segment segment = Segment::open(address);
    const SharedState shared(segment.data(),
                             SharedSizes::within(3, group_of(3, 1).staging_limit_bytes));
    shared.rank(1).pid = child.pid();
    shared.rank(1).start_time = process_start_time(child.pid());
    shared.rank(1).global_rank = 1;
    shared.rank(1).state.store(RankState::kJoined);
    std::this_thread::sleep_for(milliseconds(150));
    child.kill();
  });
  const auto text = error_text<PeerLostError>([&] { make_engine(store.view(), group_of(3, 0)); });
  EXPECT_THAT(text, HasSubstr("rank 1 (pid " + std::to_string(child.pid())));
  EXPECT_THAT(text, HasSubstr("ended while the group was created"));
  ending.join();
}

TEST(Peers, AZombieHasEnded) {
  Child child;
  const pid_t pid = child.pid();
  const uint64_t start_time = process_start_time(pid);
  EXPECT_NE(start_time, 0U);
  EXPECT_FALSE(process_has_ended(pid, start_time));
  EXPECT_TRUE(process_has_ended(pid, start_time - 1)) << "another process had this pid";
  EXPECT_FALSE(process_has_ended(pid, 0)) << "the start time is unknown";
  {
    const ZeroLimit files(RLIMIT_NOFILE);
    EXPECT_FALSE(process_has_ended(pid, start_time)) << "an unreadable /proc is not an end";
  }
  child.kill();
  EXPECT_TRUE(process_has_ended(pid, start_time)) << "its status has not been collected";
  child.end();
  EXPECT_TRUE(process_has_ended(pid, start_time));
}

// With too many open files, or in a sandbox, no process descriptor can be opened.
TEST(Peers, AreWatchedWithoutDescriptors) {
  const SharedSizes sizes = SharedSizes::within(2, 1);
  const Segment segment = Segment::create(SharedState::num_bytes(sizes));
  const SharedState shared(segment.data(), sizes);
  shared.initialize();
  const Child child;
  shared.rank(0).pid = getpid();
  shared.rank(1).pid = child.pid();
  shared.rank(1).start_time = process_start_time(child.pid());
  const auto without_descriptors = [&] {
    const ZeroLimit files(RLIMIT_NOFILE);
    return std::make_unique<Peers>(shared);
  }();
  const Peers with_descriptors(shared);
  const std::initializer_list<const Peers*> both = {without_descriptors.get(), &with_descriptors};
  for (const Peers* const peers : both) {
    EXPECT_FALSE(peers->has_ended(0));
    EXPECT_FALSE(peers->has_ended(1));
  }
  child.kill();
  for (const Peers* const peers : both) EXPECT_TRUE(peers->has_ended(1));
}

}  // namespace
}  // namespace weft::collectives::testing
