#pragma once

// Carries out what a rank asks of its group. There is no thread that does nothing else: whoever
// waits for an operation drives all of them, in the order they were asked for. Operations that are
// left alone while nobody waits are driven by a background thread, which is started then.
//
// Thread safety: all of it.

#include "collective.h"
#include "messages.h"
#include "peers.h"
#include "rendezvous.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace weft::collectives {

using OperationPtr = std::shared_ptr<Operation>;

class Engine {
 public:
  // Joins the group: see rendezvous.h.
  Engine(const Store& store, const GroupOptions& options);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  // Leaves the group; operations that are not done fail. REQUIRES: not in a forked child (which
  // has neither the memory nor the thread): there an engine is forgotten, see make_engine.
  ~Engine();

  // Begins a Collective or a Message. `in_background`: nobody may come to wait for it soon.
  // Errors: the group's, if it has failed; std::runtime_error in a forked child.
  void submit(OperationPtr operation, bool in_background);

  // Until it is done, or `timeout` has passed (zero: its own deadline): then the group fails.
  // Never throws what the operation failed with. An operation's on_done may wait for another one.
  void wait(Operation& operation, std::chrono::milliseconds timeout);
  // Does what can be done without waiting.
  void poll();

  // Fails the group on every rank, at once.
  void abort(const std::string& why);
  // Tells the others that nothing more comes from here, and fails what cannot be finished at once.
  void leave();

  // The failure of the group, as an exception, or null.
  std::exception_ptr failure() const;
  const GroupOptions& options() const { return options_; }
  // Shared memory of the group that this host holds now.
  size_t resident_bytes() const { return membership_.segment.resident_bytes(); }

 private:
  void check_usable() const;
  // The following are the driver's. REQUIRES: is_driven_, set by this thread.
  bool advance();
  void drive(const Operation* until);
  void take_inbox();
  void finish(Operation& operation, const std::exception_ptr& error);
  bool advance_collectives();
  bool advance_messages();
  void fail_all(const std::exception_ptr& error);
  void look_for_trouble();
  void fail_late(const Operation& operation);
  // An error of the whole group, from this rank.
  std::exception_ptr fail_group(ErrorKind kind, const std::string& text);

  // REQUIRES: mutex_ held.
  void wake_background();
  void run_in_background();
  // REQUIRES: mutex_ held, and this thread has stopped driving.
  void stop_driving();

  const GroupOptions options_;
  Membership membership_;
  const SharedState& shared_;
  const Peers peers_;
  const unsigned fork_generation_;
  const int num_spins_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool is_driven_ = false;
  std::atomic<bool> is_left_{false};
  std::atomic<int> num_waiting_{0};  // threads that want to drive or to see an operation done
  std::atomic<int> num_unfinished_{0};
  std::vector<OperationPtr> inbox_;
  std::atomic<bool> has_inbox_{false};
  std::thread background_;
  bool background_sleeps_ = false;
  std::condition_variable background_wakes_;

  // The driver's.
  CollectiveCursor cursor_;
  std::deque<CollectivePtr> collectives_;
  Messages messages_;
  std::chrono::steady_clock::time_point next_look_;
};

// Owns an engine as a forked child can: there it is not destroyed.
std::shared_ptr<Engine> make_engine(const Store& store, const GroupOptions& options);

}  // namespace weft::collectives
