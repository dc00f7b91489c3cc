#include "multi_host_group.h"

#include "fork_guard.h"
#include "format.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace weft::collectives {

namespace {

using Clock = std::chrono::steady_clock;

// The interval at which the watcher checks for ended processes of this host and, on a leader, for
// failures of other hosts.
constexpr std::chrono::milliseconds kCheckInterval{50};

// After a connection closes, wait this long for another rank to report the cause before raising
// PeerLostError.
constexpr std::chrono::milliseconds kCauseTimeout{40};

// After a wait for another host has timed out, wait this long for that host to name its late rank.
constexpr std::chrono::milliseconds kLateHostTimeout{300};

// A leaving rank waits at most this long for a transport that does not cancel its transfers.
constexpr std::chrono::seconds kLeaveTimeout{1};

// A rank that is not a leader polls the store once in this many checks.
constexpr unsigned kChecksPerStorePoll = 8;

// The operations whose on_done runs on this thread, the innermost last.
thread_local std::vector<const Operation*> finishing_operations;

Store with_prefix(const Store& store, const std::string& prefix) {
  return {[=](const std::string& key, const std::string& value) { store.set(prefix + key, value); },
          [=](const std::string& key, std::chrono::milliseconds timeout) {
            return store.get(prefix + key, timeout);
          },
          [=](const std::string& key) { store.remove(prefix + key); },
          [=](const std::string& key) { return store.has(prefix + key); },
          [=] { return with_prefix(store.clone(), prefix); }};
}

// The options of the group that the ranks of this host form.
GroupOptions local_options(const GroupOptions& all, const HostLayout& layout) {
  GroupOptions local = all;
  local.name += ", host " + std::to_string(layout.own_host());
  local.size = static_cast<int>(layout.own_ranks().size());
  local.rank = layout.local_rank_of(layout.own_rank);
  local.global_ranks.clear();
  for (const int rank : layout.own_ranks()) {
    local.global_ranks.push_back(
        all.global_ranks.empty() ? rank : all.global_ranks[static_cast<size_t>(rank)]);
  }
  return local;
}

std::string failure_key_of(const Identities& identities) { return "failure/" + identities.nonce; }

}  // namespace

class MultiHostGroup::CollectiveOperation final : public Operation {
 public:
  explicit CollectiveOperation(CollectiveCall call_) : call(std::move(call_)) {}
  [[nodiscard]] std::string describe() const override {
    const std::string text = collectives::describe(call.signature());
    return sequence == 0 ? text : text + ", collective " + std::to_string(sequence);
  }

  const CollectiveCall call;
  uint64_t sequence = 0;  // in the group, once submitted
};

MultiHostGroup::MultiHostGroup(const Store& store,
                               const GroupOptions& options,
                               const Identities& identities,
                               const MakeTransport& make_transport)
    : options_(options),
      layout_(identities.hosts, options.rank),
      store_(store.clone()),
      nonce_(identities.nonce),
      failure_key_(failure_key_of(identities)),
      fork_generation_(fork_generation()),
      local_group_(with_prefix(store, "host/" + std::to_string(layout_.own_host()) + "/"),
                   local_options(options, layout_)),
      transport_(make_transport("transport/" + identities.nonce)),
      messages_(transport_, options.rank, options.size) {
  // Wait until all ranks are connected: a rank that left earlier would close connections that
  // others are still making.
  store_barrier(store, options, "connected/" + nonce_, failure_key_);
  worker_ = std::thread([this] { run_worker(); });
  watcher_ = std::thread([this] { run_watcher(); });
}

MultiHostGroup::~MultiHostGroup() {
  leave();
  worker_.join();
  watcher_.join();
}

OperationPtr MultiHostGroup::make(CollectiveCall call) const {
  return std::make_shared<CollectiveOperation>(std::move(call));
}

void MultiHostGroup::submit(OperationPtr operation, bool /*in_background*/) {
  local_group_.check_usable();
  if (operation->timeout.load().count() == 0) operation->timeout = options_.timeout;
  operation->deadline = Clock::now() + operation->timeout.load();
  if (auto message = std::dynamic_pointer_cast<Message>(operation)) return begin(message);
  auto collective = std::dynamic_pointer_cast<CollectiveOperation>(operation);
  const std::lock_guard lock(mutex_);
  if (has_left_) {  // since check_usable(): no thread would run the collective
    throw GroupAbortedError("weft: rank " + std::to_string(options_.rank) + " left group '" +
                            options_.name + "' while it submitted " + operation->describe());
  }
  collective->sequence = ++num_collectives_;
  ++num_unfinished_;
  queue_.push_back(std::move(collective));
  changed_.notify_all();
}

void MultiHostGroup::begin(const MessagePtr& message) {
  std::shared_ptr<RemoteMessages::PostedMessage> posted;
  try {
    posted = messages_.post(message);
  } catch (const TransportError&) {
    std::rethrow_exception(as_failure(*message));
  }
  {
    const std::lock_guard lock(mutex_);
    ++num_unfinished_;
    changed_.notify_all();
  }
  message_threads_.run([this, message, posted = std::move(posted)]() mutable {
    std::exception_ptr error;
    try {
      messages_.finish(*posted, message->deadline);
    } catch (...) {
      error = as_failure(*message);
    }
    posted.reset();  // nothing is in flight once the message counts as done
    finish(*message, error);
  });
}

void MultiHostGroup::run_worker() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return has_left_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const auto collective = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    execute(*collective);
    lock.lock();
  }
}

void MultiHostGroup::execute(CollectiveOperation& collective) {
  std::exception_ptr error;
  try {
    const std::string what = collective.describe();
    {
      const std::lock_guard lock(mutex_);
      current_call_ = what;
    }
    local_group_.check_usable();
    CrossHost(local_group_,
              transport_,
              layout_,
              collective.call,
              what,
              collective.timeout,
              collective.deadline)
        .run();
  } catch (...) {
    error = as_failure(collective);
  }
  finish(collective, error);
}

void MultiHostGroup::finish(Operation& operation, const std::exception_ptr& error) {
  finishing_operations.push_back(&operation);
  operation.finish(error);
  finishing_operations.pop_back();
  const std::lock_guard lock(mutex_);
  --num_unfinished_;
  changed_.notify_all();
}

void MultiHostGroup::wait(Operation& operation, std::chrono::milliseconds timeout) {
  // Called from the on_done of `operation`: its data is complete.
  if (std::ranges::find(finishing_operations, &operation) != finishing_operations.end()) return;
  local_group_.check_not_forked();
  const auto until = timeout.count() == 0 ? Deadline::max() : Clock::now() + timeout;
  std::unique_lock lock(mutex_);
  if (is_worker_thread()) {
    // Called from the on_done of another operation: no other thread would execute the collectives
    // that are queued before `operation`.
    while (!operation.is_done() && !queue_.empty()) {
      const auto next = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      execute(*next);
      lock.lock();
    }
  }
  const auto is_done = [&] { return operation.is_done(); };
  if (until == Deadline::max()) return changed_.wait(lock, is_done);
  if (changed_.wait_until(lock, until, is_done)) return;
  // No rank of this host is late: wait for the failure in which another host names the late rank.
  if (!local_group_.late_ranks().has_local && changed_.wait_for(lock, kLateHostTimeout, is_done))
    return;
  lock.unlock();
  fail_late(operation, timeout, local_group_.late_ranks().text);
  lock.lock();
  changed_.wait(lock, is_done);
}

void MultiHostGroup::fail(ErrorKind kind, const std::string& text) {
  local_group_.fail(kind, text);
  report_failure();
}

void MultiHostGroup::fail_late(const Operation& operation,
                               std::chrono::milliseconds timeout,
                               const std::string& detail) {
  fail(ErrorKind::kTimeout,
       "weft: " + operation.describe() + " of group '" + options_.name + "' timed out after " +
           in_seconds(timeout) + " s on rank " + std::to_string(options_.rank) + detail +
           "; see what the late ranks do, or raise the timeout of the group or the call");
}

std::exception_ptr MultiHostGroup::as_failure(const Operation& operation) {
  try {
    throw;
  } catch (const TransportError& error) {
    const std::string peer =
        error.peer < 0 ? "a rank" : "rank " + std::to_string(error.peer) + " (on another host)";
    // A failure that this or another host has reported takes precedence: a transport may close all
    // its connections when one operation is late.
    const bool is_late = Clock::now() >= operation.deadline.load();
    const auto until = Clock::now() + (is_late ? std::chrono::milliseconds(0) : kCauseTimeout);
    check_health(true);
    while (failure() == nullptr && !has_left_ && Clock::now() < until) {
      std::this_thread::sleep_for(kCauseTimeout / 8);
      check_health(true);
    }
    const bool is_new = failure() == nullptr && !has_left_;
    if (is_new && is_late) {
      fail_late(operation, operation.timeout, ": not arrived " + peer);
    } else if (is_new && has_left(error.peer)) {
      fail(ErrorKind::kPeerLost,
           "weft: " + peer + " of group '" + options_.name + "' left the group while rank " +
               std::to_string(options_.rank) + " waited for it in " + operation.describe() +
               "; see that rank's output for the cause");
    } else if (is_new) {
      fail(ErrorKind::kPeerLost,
           "weft: " + peer + " of group '" + options_.name + "' was lost while rank " +
               std::to_string(options_.rank) + " waited for it in " + operation.describe() + " (" +
               error.what() + "); see that rank's output for the cause");
    }
  } catch (const CollectiveMismatchError& error) {
    fail(ErrorKind::kMismatch, mismatch_message(options_.name, error.what()));
  } catch (const CollectiveError&) {
    if (failure() != nullptr) report_failure();  // detected by the engine
  } catch (const std::exception& error) {
    fail(ErrorKind::kAborted,
         "weft: rank " + std::to_string(options_.rank) + " of group '" + options_.name +
             "' failed in " + operation.describe() + ": " + error.what());
  }
  if (auto error = failure()) return error;
  return std::make_exception_ptr(GroupAbortedError("weft: rank " + std::to_string(options_.rank) +
                                                   " left group '" + options_.name +
                                                   "' before this operation was done"));
}

std::string MultiHostGroup::left_key(int rank) const {
  return "left/" + nonce_ + "/" + std::to_string(rank);
}

bool MultiHostGroup::has_left(int rank) const {
  try {
    return rank >= 0 && store_.has(left_key(rank));
  } catch (const std::exception&) {
    return false;
  }
}

void MultiHostGroup::run_watcher() {
  std::unique_lock lock(mutex_);
  for (unsigned num_checks = 0; !has_left_ && !is_reported_; ++num_checks) {
    changed_.wait(lock, [&] { return has_left_ || num_unfinished_ > 0; });
    lock.unlock();
    // A failure that a leader finds in the store fails the engine of its host, for all its ranks.
    // The other ranks poll, too, but less often, because a leader without unfinished operations
    // does not poll.
    check_health(layout_.is_leader() || num_checks % kChecksPerStorePoll == 0);
    transport_.probe();
    lock.lock();
    changed_.wait_for(lock, kCheckInterval, [&] { return has_left_.load(); });
  }
}

void MultiHostGroup::check_health(bool polls_store) {
  std::string what;
  {
    const std::lock_guard lock(mutex_);
    what = current_call_;
  }
  if (failure() == nullptr)
    local_group_.check_peers(what.empty() ? "point-to-point messages" : what);
  try {
    if (polls_store && failure() == nullptr && store_.has(failure_key_)) {
      try {
        throw_failure(store_.get(failure_key_, kCheckInterval));
      } catch (const CollectiveError& reported) {
        local_group_.fail(reported.kind(), reported.what());
      }
    }
  } catch (const std::exception&) {
    // Without the store, the transport and the deadlines still reveal that another host has failed.
  }
  if (failure() != nullptr) report_failure();
}

// Ends this rank's waits for other hosts, and reports the failure to the other hosts once.
void MultiHostGroup::report_failure() {
  transport_.give_up();
  if (is_reported_.exchange(true)) return;
  try {
    std::rethrow_exception(failure());
  } catch (const CollectiveError& error) {
    try {
      if (!store_.has(failure_key_)) store_.set(failure_key_, format_failure(error));
    } catch (const std::exception&) {
      // Then the other hosts detect the failure by the transport.
    }
  }
}

void MultiHostGroup::abort(const std::string& why) {
  if (fork_generation() != fork_generation_) return;
  fail(ErrorKind::kAborted,
       "weft: rank " + std::to_string(options_.rank) + " aborted group '" + options_.name + "'" +
           (why.empty() ? "" : ": " + why));
}

void MultiHostGroup::fail_with_mismatch(const std::string& text) {
  if (fork_generation() != fork_generation_) return;
  fail(ErrorKind::kMismatch, text);
}

void MultiHostGroup::leave() {
  if (fork_generation() != fork_generation_) return;
  {
    const std::lock_guard lock(mutex_);
    if (has_left_.exchange(true)) return;
  }
  if (failure() == nullptr) {
    try {
      store_.set(left_key(options_.rank), "");
    } catch (const std::exception&) {
      // Then the other hosts detect only that a connection closes.
    }
  }
  local_group_.leave();
  transport_.give_up();
  changed_.notify_all();
  if (!finishing_operations.empty()) return;  // called from an on_done: its operation is not done
  // Closing the connections ends the waits of other hosts for this rank.
  std::unique_lock lock(mutex_);
  if (changed_.wait_for(lock, kLeaveTimeout, [&] { return num_unfinished_ == 0; }))
    transport_.close();
}

std::shared_ptr<Group> join_group(const Store& store,
                                  const GroupOptions& options,
                                  const MakeTransport& make_transport) {
  const unsigned generation = fork_generation();
  const Identities identities = exchange_identities(store, options, make_transport != nullptr);
  const HostLayout layout(identities.hosts, options.rank);
  if (const auto text = config_mismatch(layout, identities.configs, options.name)) {
    throw CollectiveMismatchError(*text);  // the other ranks detect the same mismatch
  }
  if (layout.num_hosts() == 1) return make_engine(store, options);
  store_barrier(store, options, "read/" + identities.nonce);
  forget_identity(store, options);
  try {
    return {new MultiHostGroup(store, options, identities, make_transport),
            [generation](MultiHostGroup* joined) {
              if (fork_generation() == generation) delete joined;
            }};
  } catch (const CollectiveError& error) {
    store.set(failure_key_of(identities), format_failure(error));
    throw;
  } catch (const std::exception& error) {
    const GroupAbortedError failure("weft: rank " + std::to_string(options.rank) + " of group '" +
                                    options.name + "' could not create a transport (" +
                                    error.what() + "); see that rank's output for the cause");
    store.set(failure_key_of(identities), format_failure(failure));
    throw failure;
  }
}

}  // namespace weft::collectives
