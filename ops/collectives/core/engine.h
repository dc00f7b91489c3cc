#pragma once

// Runs the operations that a rank starts in its group. One thread at a time, the driver, makes
// progress on all operations; it runs collectives in the order in which they were submitted. A
// thread drives while it waits for an operation, and once, without waiting, when it submits one or
// polls. A background thread, started on demand, drives while no other thread waits.
//
// Thread-safe.

#include "backoff.h"
#include "collective.h"
#include "group.h"
#include "messages.h"
#include "peers.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace weft::collectives {

// A group on one host.
class Engine final : public Group {
 public:
  // Joins the group: see rendezvous.h.
  Engine(const Store& store, const GroupOptions& options);
  // Leaves the group; operations that are not done fail. REQUIRES: not in a forked child, which has
  // neither the shared memory nor the background thread: see make_engine.
  ~Engine() override;

  OperationPtr make(CollectiveCall call) const override {
    return make_collective(std::move(call), options_.rank);
  }
  // `operation` is a Collective or a Message.
  void submit(OperationPtr operation, bool in_background) override;
  void wait(Operation& operation, std::chrono::milliseconds timeout) override;
  void poll() override;
  std::byte* acquire_scratch(size_t num_bytes) override;
  void submit_scratch(OperationPtr operation) override;
  void release_scratch() override;
  void abort(const std::string& why) override;
  void fail_with_mismatch(const std::string& text) override;
  void leave() override;
  std::exception_ptr failure() const override;
  const GroupOptions& options() const override { return options_; }
  size_t resident_bytes() const override { return membership_.segment.resident_bytes(); }
  size_t own_resident_bytes() const override;

  // check_usable() throws the errors of submit(); check_not_forked() throws those of wait().
  void check_usable() const;
  void check_not_forked() const;
  // The ranks that have not arrived at the barrier where this rank waits: ranks of this host, and
  // ranks of other hosts that a rank of this host waits for.
  struct LateRanks {
    std::string text;        // ": not arrived rank 1 (pid 5)", or empty
    bool has_local = false;  // whether a rank of this host is among them
  };
  LateRanks late_ranks() const;
  // Fails the group on every rank; returns its first failure, which may be an earlier one.
  std::exception_ptr fail(ErrorKind kind, const std::string& text);
  // Publishes the rank of another host that this rank waits for, or kNoRank. If this rank is late,
  // the other ranks of this host name the published rank in their error.
  void publish_waiting(int remote_rank) {
    shared_.rank(options_.rank).waits_for.store(remote_rank, std::memory_order_relaxed);
  }
  // Fails the group if the process of a rank has ended without leaving the group. For a caller that
  // waits outside of this engine; `what` names the caller's operation in the error message.
  void check_peers(const std::string& what);

 private:
  // Only the driver calls the following. REQUIRES: is_driven_, set by this thread.
  bool advance();
  void drive(const Operation* until);
  void take_inbox();
  void finish(Operation& operation, const std::exception_ptr& error);
  bool advance_collectives();
  bool advance_messages();
  void fail_all(const std::exception_ptr& error);
  void check_health();
  void fail_late(const Operation& operation);

  // The following two may run on any thread.
  bool ended_without_leaving(int peer) const;
  std::exception_ptr fail_lost(int peer, const char* how, const std::string& what);

  // Starts the background thread or wakes it. REQUIRES: mutex_ held.
  void wake_background();
  // The background thread. REQUIRES: mutex_ not held.
  void run_in_background();
  // Starts an operation that has been queued. REQUIRES: `lock` holds mutex_.
  void begin(Operation& operation, bool in_background, std::unique_lock<std::mutex>& lock);
  // Calls `drive_now` as the driver. REQUIRES: `lock` holds mutex_, and no thread drives.
  template <typename Drive>
  void drive_unlocked(std::unique_lock<std::mutex>& lock, const Drive& drive_now);

  const GroupOptions options_;
  Membership membership_;
  const SharedState& shared_;
  const Peers peers_;
  const unsigned fork_generation_;
  const CrowdedGroup crowded_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool is_driven_ = false;
  std::atomic<bool> has_left_{false};
  std::atomic<int> num_waiting_{0};  // threads in wait() while another one drives
  std::atomic<int> num_unfinished_{0};
  uint64_t num_begun_ = 0;  // operations, and uses of scratch memory
  // The result of own_resident_bytes() when `num_begun` had begun and the engine was idle.
  struct Resident {
    uint64_t num_begun = UINT64_MAX;
    size_t num_bytes = 0;
  };
  mutable Resident resident_;
  std::vector<OperationPtr> inbox_;
  std::atomic<bool> has_inbox_{false};
  OperationPtr scratch_operation_;                // runs before the inbox's operations
  std::atomic<bool> is_scratch_acquired_{false};  // while true, no collective begins
  std::thread background_;
  bool background_sleeps_ = false;
  std::condition_variable background_wakes_;

  // Used by the driver only.
  CollectiveCursor cursor_;
  std::deque<CollectivePtr> collectives_;
  Messages messages_;
  std::chrono::steady_clock::time_point next_check_;
};

// Returns a new engine, which a forked child does not destroy.
std::shared_ptr<Engine> make_engine(const Store& store, const GroupOptions& options);

}  // namespace weft::collectives
