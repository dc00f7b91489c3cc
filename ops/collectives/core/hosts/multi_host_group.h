#pragma once

// A multi-host group: an Engine for the ranks of each host, and a transport between the hosts. On
// each rank a worker thread runs the collectives in order, each message in flight has a thread, and
// a watcher thread checks for failures while there is work. Hosts report failures to each other
// through the store.

#include "cross_host.h"
#include "remote_messages.h"
#include "task_threads.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace weft::collectives {

class MultiHostGroup final : public Group {
 public:
  // Blocks until all ranks have joined. Errors: those of Engine, of store_barrier() and of
  // make_transport.
  MultiHostGroup(const Store& store,
                 const GroupOptions& options,
                 const Identities& identities,
                 const MakeTransport& make_transport);
  // Leaves the group. REQUIRES: not in a forked child.
  ~MultiHostGroup() override;

  OperationPtr make(CollectiveCall call) const override;
  void submit(OperationPtr operation, bool in_background) override;
  void wait(Operation& operation, std::chrono::milliseconds timeout) override;
  void poll() override {}  // the threads make all progress
  void abort(const std::string& why) override;
  void fail_with_mismatch(const std::string& text) override;
  void leave() override;
  std::exception_ptr failure() const override { return local_group_.failure(); }
  const GroupOptions& options() const override { return options_; }
  size_t resident_bytes() const override { return local_group_.resident_bytes(); }
  size_t own_resident_bytes() const override { return local_group_.own_resident_bytes(); }

 private:
  class CollectiveOperation;
  using CollectiveOperationPtr = std::shared_ptr<CollectiveOperation>;

  void begin(const MessagePtr& message);
  void run_worker();
  void execute(CollectiveOperation& collective);
  void finish(Operation& operation, const std::exception_ptr& error);
  void fail(ErrorKind kind, const std::string& text);
  // Call it in a catch block while `operation` runs: fails the group if it has not failed yet, and
  // returns the failure of the group. After leave() it may return a GroupAbortedError of this rank
  // only.
  std::exception_ptr as_failure(const Operation& operation);
  void fail_late(const Operation& operation,
                 std::chrono::milliseconds timeout,
                 const std::string& detail);
  void report_failure();
  // The key that `rank` sets in the store when it leaves: explains to other ranks why its
  // connections close.
  std::string left_key(int rank) const;
  bool has_left(int rank) const;
  void run_watcher();
  // `polls_store`: also checks the store for a failure of another host.
  void check_health(bool polls_store);
  bool is_worker_thread() const { return worker_.get_id() == std::this_thread::get_id(); }

  const GroupOptions options_;
  const HostLayout layout_;
  const Store store_;
  const std::string nonce_;
  const std::string failure_key_;  // of the store, for reports between hosts
  const unsigned fork_generation_;
  Engine local_group_;
  ThreadSafeTransport transport_;
  RemoteMessages messages_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<CollectiveOperationPtr> queue_;
  uint64_t num_collectives_ = 0;
  int num_unfinished_ = 0;
  std::string current_call_;  // the latest collective, for error messages
  std::atomic<bool> has_left_{false};
  std::atomic<bool> is_reported_{false};  // report_failure() has run, the watcher may stop
  TaskThreads message_threads_;
  std::thread worker_;
  std::thread watcher_;
};

// Joins a group and returns it: an Engine if all ranks run on one host, else a MultiHostGroup. A
// forked child does not destroy it.
// Errors: those of exchange_identities() and of both constructors (an error of make_transport
// becomes a GroupAbortedError); CollectiveMismatchError, the same on all ranks, if the group
// configurations of the ranks are incompatible: see group_config.h.
std::shared_ptr<Group> join_group(const Store& store,
                                  const GroupOptions& options,
                                  const MakeTransport& make_transport);

}  // namespace weft::collectives
