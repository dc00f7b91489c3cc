// Ranks of one group of the torch-free core: threads that share one mapping, or forked processes.
#pragma once

#include "engine.h"
#include "exchanges.h"

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
            }};
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

// Runs `body(engine, rank)` on a thread per rank; an exception on any fails the test.
template <typename Body>
void run_threads(int num_ranks, const Body& body, const GroupOptions& like = group_of(1, 0)) {
  MemoryStore store;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        GroupOptions options = like;
        options.rank = rank;
        options.size = num_ranks;
        const auto engine = make_engine(store.view(), options);
        body(*engine, rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Submits, waits, throws what it failed with.
template <typename Pointer>
void complete(Engine& engine, const Pointer& operation, bool in_background = false) {
  engine.submit(operation, in_background);
  engine.wait(*operation, milliseconds(0));
  if (operation->error()) std::rethrow_exception(operation->error());
}

// What `body` throws, as text; empty if it throws nothing of this class.
template <typename Error, typename Body>
std::string text_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another class: " << error.what();
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
