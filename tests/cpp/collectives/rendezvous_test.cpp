// How a group is made, and what all its ranks read where it cannot be.
#include "peers.h"
#include "ranks.h"
#include "terms.h"

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

// What each rank reads when it makes a group; "" where it made one. Every rank has the view of the
// store that `view` gives it.
std::vector<std::string> texts_of(
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
      texts[static_cast<size_t>(rank)] = text_of<CollectiveError>([&] {
        const auto group = join_group(view(rank, store.view()), options, {});
        complete(*group, barrier_call());
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return texts;
}

TEST(Terms, OtherLimitsOfStagingAreRefusedByAllRanks) {
  MemoryStore store;
  const auto start = Clock::now();
  const auto texts = texts_of(store, 3, [](GroupOptions& options) {
    if (options.rank == 1) options.staging_limit_bytes = 4 << 20;
  });
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(2)) << "a rank waited for the timeout";
  for (const std::string& text : texts) EXPECT_EQ(text, texts.front());
  EXPECT_EQ(texts.front(),
            "weft: the ranks of group 'test' on one host got different options "
            "staging_limit_bytes: ranks 0, 2 brought 16777216; rank 1 brought 4194304; pass the "
            "same on every rank of a host");
}

// Groups one after another over one store; a slow rank is still about to go on from one when
// others make the next.
TEST(Joining, NothingStaysOfAGroupThatWasMade) {
  MemoryStore store;
  for (const size_t limit : {1, 1 << 20, 1 << 24}) {
    for (const int num_ranks : {3, 2}) {
      const auto texts = texts_of(
          store, num_ranks, [&](GroupOptions& options) { options.staging_limit_bytes = limit; });
      EXPECT_EQ(texts, std::vector<std::string>(texts.size()));
    }
  }
  EXPECT_EQ(store.num_keys(), 0U);
}

TEST(Terms, HostsHaveLimitsOfTheirOwn) {
  const HostLayout layout({"a", "a", "b"}, 0);
  std::vector<Terms> terms(3);
  for (Terms& each : terms) each.has_transport = true;
  terms[2].staging_limit_bytes = 1;
  EXPECT_EQ(misfit(layout, terms, "g"), std::nullopt);
  terms[1].staging_limit_bytes = 1;
  EXPECT_THAT(misfit(layout, terms, "g").value_or(""),
              HasSubstr("rank 0 brought 0; rank 1 brought 1"));
}

TEST(Terms, SeveralHostsWantATransportOnAllRanks) {
  const HostLayout layout({"a", "b", "a"}, 1);
  std::vector<Terms> terms(3);
  terms[1].has_transport = true;
  EXPECT_THAT(misfit(layout, terms, "g").value_or(""),
              HasSubstr("on 2 hosts and no transport between them on rank 0, 2;"));
  EXPECT_EQ(misfit(HostLayout({"a", "a", "a"}, 1), terms, "g"), std::nullopt);
}

TEST(Terms, AnotherVersionIsNamedAndNotRead) {
  const HostLayout layout({"a", "a"}, 0);
  Terms own;
  own.staging_limit_bytes = 7;
  own.has_transport = true;
  const Terms same = Terms::parse(own.to_string());
  EXPECT_EQ(same.staging_limit_bytes, 7U);
  EXPECT_TRUE(same.has_transport);
  const Terms other = Terms::parse("99.0 something else");
  EXPECT_EQ(other.staging_limit_bytes, 0U);
  EXPECT_THAT(
      misfit(layout, {own, other}, "g").value_or(""),
      HasSubstr("rank 0 brought weft " + Terms::own_version() + "; rank 1 brought weft 99.0"));
}

TEST(Joining, MemoryThatOneRankCannotOpenIsRefusedByAll) {
  MemoryStore store;
  const auto start = Clock::now();
  const auto texts = texts_of(
      store,
      3,
      [](GroupOptions&) {},
      [](int rank, Store view) {
        if (rank != 1) return view;
        // As if rank 0's process were not to be seen from here.
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
  // Its status stays to be asked for.
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

// A limit of this process, 0 for as long as it lives: of open files, or of the size of a file.
class NoMore {
 public:
  explicit NoMore(decltype(RLIMIT_NOFILE) resource) : resource_(resource) {
    getrlimit(resource_, &before_);
    rlimit none = before_;
    none.rlim_cur = 0;
    setrlimit(resource_, &none);
  }
  NoMore(const NoMore&) = delete;
  NoMore& operator=(const NoMore&) = delete;
  ~NoMore() { setrlimit(resource_, &before_); }

 private:
  const decltype(RLIMIT_NOFILE) resource_;
  rlimit before_{};
};

TEST(Joining, MemoryThatCannotBeMadeIsRefusedByAll) {
  MemoryStore store;
  std::vector<std::string> texts(3);
  std::vector<std::thread> threads;
  std::signal(SIGXFSZ, SIG_IGN);
  {
    const NoMore size(RLIMIT_FSIZE);
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        texts[static_cast<size_t>(rank)] =
            text_of<GroupAbortedError>([&] { make_engine(store.view(), group_of(3, rank)); });
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  for (const std::string& text : texts) EXPECT_EQ(text, texts.front());
  EXPECT_THAT(texts.front(), HasSubstr("rank 0 of group 'test' could not make shared memory"));
}

// It would be taken for one of another host.
TEST(Joining, AHostThatCannotBeToldIsNoOtherHost) {
  const std::string usual = host_identity();
  {
    const NoMore files(RLIMIT_NOFILE);
    EXPECT_THROW(host_identity(), std::system_error);
  }
  EXPECT_EQ(host_identity(), usual);
}

TEST(Joining, ARankThatEndsMeanwhileIsNamed) {
  const Child child;
  MemoryStore store;
  std::thread ending([&] {
    // As if rank 1 were that process, which has joined and ends before the last rank comes.
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
  const auto text = text_of<PeerLostError>([&] { make_engine(store.view(), group_of(3, 0)); });
  EXPECT_THAT(text, HasSubstr("rank 1 (pid " + std::to_string(child.pid())));
  EXPECT_THAT(text, HasSubstr("ended while the group was made"));
  ending.join();
}

TEST(Peers, AProcessHasEndedWhenItRunsNoMore) {
  Child child;
  const pid_t pid = child.pid();
  const uint64_t start_time = process_start_time(pid);
  EXPECT_NE(start_time, 0U);
  EXPECT_FALSE(process_has_ended(pid, start_time));
  EXPECT_TRUE(process_has_ended(pid, start_time - 1)) << "that was another one";
  EXPECT_FALSE(process_has_ended(pid, 0)) << "whenever it started";
  {
    const NoMore files(RLIMIT_NOFILE);
    EXPECT_FALSE(process_has_ended(pid, start_time)) << "not to be found out is not an end";
  }
  child.kill();
  EXPECT_TRUE(process_has_ended(pid, start_time)) << "its parent has yet to ask";
  child.end();
  EXPECT_TRUE(process_has_ended(pid, start_time));
}

// Too many open files, or a sandbox: no descriptor of a process is to be had.
TEST(Peers, AreWatchedWithoutDescriptors) {
  const SharedSizes sizes = SharedSizes::within(2, 1);
  const Segment segment = Segment::create(SharedState::num_bytes(sizes));
  const SharedState shared(segment.data(), sizes);
  shared.initialize();
  const Child child;
  shared.rank(0).pid = getpid();
  shared.rank(1).pid = child.pid();
  shared.rank(1).start_time = process_start_time(child.pid());
  const auto blind = [&] {
    const NoMore files(RLIMIT_NOFILE);
    return std::make_unique<Peers>(shared);
  }();
  const Peers usual(shared);
  for (const Peers* const peers : std::initializer_list<const Peers*>{blind.get(), &usual}) {
    EXPECT_FALSE(peers->has_ended(0));
    EXPECT_FALSE(peers->has_ended(1));
  }
  child.kill();
  for (const Peers* const peers : std::initializer_list<const Peers*>{blind.get(), &usual})
    EXPECT_TRUE(peers->has_ended(1));
}

}  // namespace
}  // namespace weft::collectives::testing
