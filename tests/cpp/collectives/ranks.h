// Runs the ranks of a group of the torch-free core as threads.
#pragma once

#include "engine.h"
#include "mailboxes.h"
#include "messages.h"
#include "multi_host_group.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace weft::collectives::testing {

using std::chrono::milliseconds;

class MemoryStore {
 public:
  Store view() {
    return {[this](const std::string& key, const std::string& value) {
              const std::lock_guard lock(mutex_);
              values_[key] = value;
              changed_.notify_all();
            },
            [this](const std::string& key, milliseconds timeout) {
              std::unique_lock lock(mutex_);
              if (!changed_.wait_for(lock, timeout, [&] { return values_.contains(key); })) {
                throw std::runtime_error("no key " + key);
              }
              return values_[key];
            },
            [this](const std::string& key) {
              const std::lock_guard lock(mutex_);
              values_.erase(key);
            },
            [this](const std::string& key) {
              const std::lock_guard lock(mutex_);
              return values_.contains(key);
            },
            [this] { return view(); }};
  }
  size_t num_keys() {
    const std::lock_guard lock(mutex_);
    return values_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

inline GroupOptions group_of(int size, int rank, milliseconds timeout = milliseconds(20000)) {
  GroupOptions options;
  options.name = "test";
  options.rank = rank;
  options.size = size;
  options.timeout = timeout;
  return options;
}

// Runs `body(group, rank)` on a thread per rank, with the group that `make_group(store, options)`
// returns a pointer to. Rank and size of the options are set here, the others are those of `like`.
// An exception on any thread fails the test.
template <typename MakeGroup, typename Body>
void run_groups(int num_ranks,
                const MakeGroup& make_group,
                const Body& body,
                const GroupOptions& like) {
  MemoryStore store;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        GroupOptions options = like;
        options.rank = rank;
        options.size = num_ranks;
        const auto group = make_group(store.view(), options);
        body(*group, rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Runs `body(engine, rank)` for ranks on one host.
template <typename Body>
void run_threads(int num_ranks, const Body& body, const GroupOptions& like = group_of(1, 0)) {
  run_groups(
      num_ranks,
      [](const Store& store, const GroupOptions& options) { return make_engine(store, options); },
      body,
      like);
}

// Runs `body(group, rank)` for ranks on several hosts, given as a letter for each rank: "aab". If
// all letters are equal, the ranks are on one host.
template <typename Body>
void run_on_hosts(const std::string& hosts,
                  const Body& body,
                  const GroupOptions& like = group_of(1, 0)) {
  const auto num_ranks = static_cast<int>(hosts.size());
  if (hosts.find_first_not_of(hosts.front()) == std::string::npos) {
    return run_threads(num_ranks, body, like);
  }
  Mailboxes mailboxes;
  Identities identities;
  for (const char host : hosts) identities.hosts.emplace_back(1, host);
  run_groups(
      num_ranks,
      [&](const Store& store, const GroupOptions& options) {
        return std::make_unique<MultiHostGroup>(
            store, options, identities, [&, rank = options.rank](const std::string& /*name*/) {
              return std::make_unique<MailboxTransport>(mailboxes, rank);
            });
      },
      body,
      like);
}

// Submits an operation, waits for it, and throws its error if it failed.
inline void complete(Group& group, const OperationPtr& operation, bool in_background = false) {
  group.submit(operation, in_background);
  group.wait(*operation, milliseconds(0));
  if (operation->error()) std::rethrow_exception(operation->error());
}
inline void complete(Group& group, CollectiveCall call, bool in_background = false) {
  complete(group, group.make(std::move(call)), in_background);
}

// Returns the text of the Error that `body` throws; empty if it throws nothing.
template <typename Error, typename Body>
std::string error_text(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "an exception of another class: " << error.what();
  }
  return {};
}

template <typename T>
std::byte* bytes(std::vector<T>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

template <typename T>
Input input(std::vector<T>& values) {
  return {bytes(values), static_cast<int64_t>(values.size())};
}

template <typename T>
Output output(std::vector<T>& values) {
  return {bytes(values), static_cast<int64_t>(values.size())};
}

}  // namespace weft::collectives::testing
