#pragma once

// A group on several hosts: an Engine for the ranks of each host, and a transport between them. A
// thread carries out the collectives one after another, a thread each the messages under way, and
// one more looks for trouble while there is work: a failure on one host reaches the others through
// the store.

#include "cross_host.h"
#include "remote_messages.h"
#include "task_threads.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace weft::collectives {

class HostsGroup final : public Group {
 public:
  // Blocks until all ranks are there. Errors: as of Engine; what the transport throws.
  HostsGroup(const Store& store,
             const GroupOptions& options,
             const Identities& identities,
             const MakeTransport& make_transport);
  // Leaves the group. REQUIRES: not in a forked child.
  ~HostsGroup() override;

  OperationPtr make(CollectiveCall call) const override;
  void submit(OperationPtr operation, bool in_background) override;
  void wait(Operation& operation, std::chrono::milliseconds timeout) override;
  void poll() override {}  // the threads do what can be done
  void abort(const std::string& why) override;
  void refuse(const std::string& text) override;
  void leave() override;
  std::exception_ptr failure() const override { return here_.failure(); }
  const GroupOptions& options() const override { return options_; }
  size_t resident_bytes() const override { return here_.resident_bytes(); }
  size_t own_resident_bytes() const override { return here_.own_resident_bytes(); }

 private:
  class CollectiveOperation;
  using CollectiveOperationPtr = std::shared_ptr<CollectiveOperation>;

  void begin(const MessagePtr& message);
  void work();
  void carry_out(CollectiveOperation& collective);
  void finish(Operation& operation, const std::exception_ptr& error);
  void fail(ErrorKind kind, const std::string& text);
  // The failure of the group that `operation` met: an exception that is being handled.
  std::exception_ptr as_failure(const Operation& operation);
  void fail_late(const Operation& operation,
                 std::chrono::milliseconds timeout,
                 const std::string& detail);
  void tell_failure();
  // What a rank leaves in the store when it goes, for those who see a connection end.
  std::string left_key(int rank) const;
  bool has_left(int rank) const;
  void watch();
  // `asks_others`: whether another host has failed, too.
  void look_for_trouble(bool asks_others);
  bool is_working_here() const { return worker_.get_id() == std::this_thread::get_id(); }

  const GroupOptions options_;
  const HostLayout layout_;
  const Store store_;
  const std::string nonce_;
  const std::string failure_key_;  // where the hosts tell each other
  const unsigned fork_generation_;
  Engine here_;
  Remote remote_;
  RemoteMessages messages_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<CollectiveOperationPtr> queue_;
  uint64_t num_collectives_ = 0;
  int num_unfinished_ = 0;
  std::string under_way_;  // for texts
  std::atomic<bool> is_left_{false};
  std::atomic<bool> is_told_{false};  // the failure, to the other hosts
  TaskThreads message_threads_;
  std::thread worker_;
  std::thread watcher_;
};

// Joins a group wherever its ranks run: on one host an Engine, else a HostsGroup. A forked child
// forgets it instead of destroying it.
// Errors: as of both; CollectiveMismatchError, the same on all ranks, where these brought options
// that do not make a group together: see terms.h.
std::shared_ptr<Group> join_group(const Store& store,
                                  const GroupOptions& options,
                                  const MakeTransport& make_transport);

}  // namespace weft::collectives
