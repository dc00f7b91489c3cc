// Ranks that are processes: one is killed, one forks, and no descriptors of shared memory stay
// open.
#include "ranks.h"
#include "reductions.h"

#include <gmock/gmock.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sys/wait.h>
#include <unistd.h>

namespace weft::collectives::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

// A store with a file per key, written atomically.
class FolderStore {
 public:
  FolderStore() {
    // mkdtemp requires these six letters and replaces them.
    std::string name = (fs::temp_directory_path() / "weft-store-XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  void remove() const { fs::remove_all(folder_); }

  Store view() const {
    return {[this](const std::string& key, const std::string& value) {
              const fs::path part = path(key).string() + ".part" + std::to_string(getpid());
              std::ofstream(part) << value;
              fs::rename(part, path(key));
            },
            [this](const std::string& key, milliseconds timeout) {
              const auto deadline = Clock::now() + timeout;
              while (!fs::exists(path(key))) {
                if (Clock::now() > deadline) throw std::runtime_error("no key " + key);
                std::this_thread::sleep_for(milliseconds(1));
              }
              std::string value;
              std::ifstream file(path(key));
              std::getline(file, value);
              return value;
            },
            [this](const std::string& key) { fs::remove(path(key)); },
            [this](const std::string& key) { return fs::exists(path(key)); },
            [this] { return view(); }};
  }

 private:
  fs::path path(std::string key) const {
    for (char& c : key) c = c == '/' ? '_' : c;
    return folder_ / key;
  }
  fs::path folder_;
};

// Forks a process per rank, whose exit status is the result of `body(engine, rank)`. Returns the
// pids.
template <typename Body>
std::vector<pid_t> fork_ranks(int num_ranks, const FolderStore& store, const Body& body) {
  std::vector<pid_t> pids;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      int status = 99;
      try {
        const auto engine = make_engine(store.view(), group_of(num_ranks, rank));
        status = body(*engine, rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      _exit(status);
    }
    pids.push_back(pid);
  }
  return pids;
}

int exit_status(pid_t pid) {
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int reduce_once(Engine& engine, int rank) {
  std::vector<float> values(100000, static_cast<float>(rank + 1));
  complete(
      engine,
      all_reduce_call({DType::kFloat32, {100000}}, ReduceOp::kSum, input(values), output(values)));
  return values.front() == 6.F && values.back() == 6.F ? 0 : 1;
}

TEST(Processes, ReduceOverSharedMemory) {
  const FolderStore store;
  for (const pid_t pid : fork_ranks(3, store, reduce_once)) EXPECT_EQ(exit_status(pid), 0);
  store.remove();
}

TEST(Processes, TheEndOfARankIsDetectedAndNamed) {
  for (int victim = 0; victim < 3; ++victim) {
    const FolderStore store;
    const auto pids = fork_ranks(3, store, [&](Engine& engine, int rank) {
      complete(engine, barrier_call());
      if (rank == victim) {
        // Killed in the barrier, where all but rank (victim + 1) % 3 wait.
        std::thread([] {
          std::this_thread::sleep_for(milliseconds(50));
          kill(getpid(), SIGKILL);
        }).detach();
      }
      if (rank == (victim + 1) % 3) std::this_thread::sleep_for(milliseconds(400));
      const auto start = Clock::now();
      const auto text = error_text<PeerLostError>([&] { complete(engine, barrier_call()); });
      const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
      const bool is_named =
          text.find("rank " + std::to_string(victim) + " (pid ") != std::string::npos;
      if (!is_named) std::fprintf(stderr, "rank %d read: %s\n", rank, text.c_str());
      return is_named && waited < milliseconds(5000) ? 0 : 1;
    });
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(exit_status(pids[static_cast<size_t>(rank)]), rank == victim ? -SIGKILL : 0);
    }
    store.remove();
  }
}

TEST(Processes, TheEndOfARankIsNamedDuringLargeCollectives) {
  constexpr int64_t kSize = 3000000;
  for (int victim = 0; victim < 3; ++victim) {
    const FolderStore store;
    const auto pids = fork_ranks(3, store, [&](Engine& engine, int rank) {
      std::vector<float> values(kSize, 1.F);
      const auto reduce = [&] {
        complete(engine,
                 all_reduce_call(
                     {DType::kFloat32, {kSize}}, ReduceOp::kMax, input(values), output(values)));
      };
      reduce();
      if (rank == victim) {
        std::thread([] {
          std::this_thread::sleep_for(milliseconds(100));
          kill(getpid(), SIGKILL);
        }).detach();
      }
      const auto text = error_text<PeerLostError>([&] {
        for (;;) reduce();
      });
      const bool is_named =
          text.find("rank " + std::to_string(victim) + " (pid ") != std::string::npos;
      if (!is_named) std::fprintf(stderr, "rank %d read: %s\n", rank, text.c_str());
      return is_named ? 0 : 1;
    });
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(exit_status(pids[static_cast<size_t>(rank)]), rank == victim ? -SIGKILL : 0);
    }
    store.remove();
  }
}

TEST(Processes, AForkedChildGetsAnErrorAndItsGroupStillWorks) {
  const FolderStore store;
  const auto pids = fork_ranks(2, store, [](Engine& engine, int rank) {
    complete(engine, barrier_call());
    if (rank == 0) {
      const pid_t child = fork();
      if (child == 0) {
        const auto text = error_text<std::runtime_error>([&] { complete(engine, barrier_call()); });
        _exit(text.find("in a process forked after the group was created") == std::string::npos);
      }
      if (exit_status(child) != 0) return 1;
    }
    complete(engine, barrier_call());
    return 0;
  });
  for (const pid_t pid : pids) EXPECT_EQ(exit_status(pid), 0);
  store.remove();
}

TEST(Processes, OwnResidentBytesGrowWithScratchAndWithEachOperation) {
  const FolderStore store;
  constexpr size_t kScratchBytes = 64 * 1024;
  const auto pids = fork_ranks(2, store, [](Engine& engine, int rank) {
    static_cast<void>(rank);
    complete(engine, barrier_call());
    const size_t at_first = engine.own_resident_bytes();
    std::byte* const scratch = engine.acquire_scratch(kScratchBytes);
    if (scratch == nullptr) return 1;
    std::memset(scratch, 1, kScratchBytes);
    engine.release_scratch();
    const size_t with_scratch = engine.own_resident_bytes();
    if (with_scratch < at_first + kScratchBytes) return 2;
    if (engine.own_resident_bytes() != with_scratch) return 3;
    std::vector<float> values(1000000, 1.F);
    complete(engine,
             all_reduce_call(
                 {DType::kFloat32, {1000000}}, ReduceOp::kSum, input(values), output(values)));
    return engine.own_resident_bytes() > with_scratch ? 0 : 4;
  });
  for (const pid_t pid : pids) EXPECT_EQ(exit_status(pid), 0);
  store.remove();
}

TEST(Processes, NoDescriptorStaysOpenAndResidentMemoryIsBounded) {
  const FolderStore store;
  const auto pids = fork_ranks(2, store, [](Engine& engine, int rank) {
    complete(engine, barrier_call());
    for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      if (fs::read_symlink(entry.path(), gone).string().find("memfd:weft") != std::string::npos) {
        return 1;
      }
    }
    std::vector<float> values(1000000, 1.F);
    complete(engine,
             all_reduce_call(
                 {DType::kFloat32, {1000000}}, ReduceOp::kSum, input(values), output(values)));
    complete(engine, barrier_call());
    static_cast<void>(rank);
    return engine.resident_bytes() <= 16 * 1024 * 1024 ? 0 : 2;
  });
  for (const pid_t pid : pids) EXPECT_EQ(exit_status(pid), 0);
  store.remove();
}

}  // namespace
}  // namespace weft::collectives::testing
