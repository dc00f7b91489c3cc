#include "engine.h"

#include "backoff.h"
#include "fork_guard.h"

#include <sched.h>
#include <stdexcept>
#include <utility>

namespace weft::collectives {

namespace {

using Clock = std::chrono::steady_clock;

// The driver checks for lost peers and passed deadlines at this interval. It may sleep for one more
// interval before a check, so detection takes up to twice this time.
constexpr std::chrono::milliseconds kCheckInterval{25};

// How the background thread waits to drive. Most callers wait for their result sooner than
// kBackgroundPollInterval, and waking a thread for each operation would take longer than a small
// operation. Therefore the thread polls at this interval while there is work. After more than
// kIdlePollsBeforeSleep polls without work it sleeps until wake_background().
constexpr std::chrono::microseconds kBackgroundPollInterval{300};
constexpr int kIdlePollsBeforeSleep = 10;

// How many times a driver polls before it yields. If every rank has a processor, spinning for some
// microseconds is cheaper than a wake-up. If ranks share processors, the rank that this rank waits
// for may need this processor.
constexpr int kSpins = 2000;
constexpr int kSpinsIfCrowded = 20;

// After spinning, a rank yields its processor, perhaps to the rank it waits for, before it sleeps:
// waking up takes longer than most operations. Measured on 2 processors with
// benchmarks/collectives.py: a 4 KiB all-reduce on 4 ranks takes 280 to 430 us without yields and
// 75 to 90 us with them. Beside a process that computes, a yield lasts as long as that process
// runs, while a rank that sleeps runs soon after it is woken up. With benchmarks/latency.py, 256
// KiB on 4 ranks take 310 to 440 us beside a busy process (P50) with this time, and 3,600 to 4,000
// us with ten times as much.
constexpr std::chrono::microseconds kYieldTime{1000};

// The engine that this thread drives, or null. wait() needs it, because an on_done may call wait()
// on the engine that runs the on_done.
thread_local const Engine* driven_engine = nullptr;

class Driving {
 public:
  explicit Driving(const Engine* engine) : outer_(std::exchange(driven_engine, engine)) {}
  Driving(const Driving&) = delete;
  Driving& operator=(const Driving&) = delete;
  ~Driving() { driven_engine = outer_; }

 private:
  const Engine* const outer_;
};

}  // namespace

Engine::Engine(const Store& store, const GroupOptions& options)
    : options_(options),
      membership_(join_on_host(store, options)),
      shared_(membership_.shared),
      peers_(shared_),
      fork_generation_(fork_generation()),
      crowded_(options.size > num_processors(shared_)),
      cursor_{Barrier(shared_, options.rank), 0, 0},
      messages_(shared_, options.rank) {}

Engine::~Engine() {
  leave();
  if (background_.joinable()) background_.join();
}

void Engine::check_not_forked() const {
  if (fork_generation() == fork_generation_) return;
  throw std::runtime_error("weft: got a call on group '" + options_.name +
                           "' in a process forked after the group was created; create a new group "
                           "there, or start the process with spawn");
}

void Engine::check_usable() const {
  check_not_forked();
  if (auto error = failure()) std::rethrow_exception(error);
  if (has_left_) {
    throw GroupAbortedError(
        "weft: got a call on group '" + options_.name +
        "', which this rank has left (destroy_process_group); create a new group");
  }
}

template <typename Drive>
void Engine::drive_unlocked(std::unique_lock<std::mutex>& lock, const Drive& drive_now) {
  is_driven_ = true;
  lock.unlock();
  {
    const Driving driving(this);
    drive_now();
  }
  lock.lock();
  is_driven_ = false;
  if (num_waiting_ > 0) changed_.notify_all();
}

void Engine::submit(OperationPtr operation, bool in_background) {
  std::unique_lock lock(mutex_);
  check_usable();
  inbox_.push_back(operation);
  begin(*operation, in_background, lock);
}

void Engine::begin(Operation& operation, bool in_background, std::unique_lock<std::mutex>& lock) {
  if (operation.timeout.load().count() == 0) operation.timeout = options_.timeout;
  operation.deadline = Clock::now() + operation.timeout.load() + operation.grace;
  ++num_unfinished_;
  ++num_begun_;
  has_inbox_.store(true);
  if (in_background) wake_background();
  if (is_driven_) {
    lock.unlock();
    shared_.rank(options_.rank).doorbell.ring();
    return;
  }
  drive_unlocked(lock, [this] { advance(); });
}

std::byte* Engine::acquire_scratch(size_t num_bytes) {
  const std::lock_guard lock(mutex_);
  const bool is_idle = !is_driven_ && num_unfinished_ == 0 && !is_scratch_acquired_;
  if (!is_idle || num_bytes > shared_.staging_bytes() || has_left_) return nullptr;
  if (fork_generation() != fork_generation_) return nullptr;
  is_scratch_acquired_ = true;
  ++num_begun_;
  // No rank reads this buffer any more: this rank has passed the last barrier of the previous
  // collective, see collective.h.
  return shared_.staging(options_.rank, cursor_.buffer);
}

void Engine::submit_scratch(OperationPtr operation) {
  std::unique_lock lock(mutex_);
  scratch_operation_ = operation;  // the driver runs it first, see take_inbox
  begin(*operation, /*in_background=*/false, lock);
}

void Engine::release_scratch() {
  std::unique_lock lock(mutex_);
  is_scratch_acquired_ = false;
  if (num_unfinished_ == 0) return;
  lock.unlock();
  shared_.rank(options_.rank).doorbell.ring();
  poll();
}

void Engine::wake_background() {
  if (!background_.joinable()) background_ = std::thread([this] { run_in_background(); });
  if (std::exchange(background_sleeps_, false)) background_wakes_.notify_one();
}

void Engine::wait(Operation& operation, std::chrono::milliseconds timeout) {
  if (operation.is_done()) return;
  check_not_forked();
  if (driven_engine == this && operation.is_finishing()) return;  // its data is complete
  if (timeout.count() > 0) {  // the driver reads the new deadline at its next check
    const auto until = Clock::now() + timeout;
    auto before = operation.deadline.load();
    while (until < before && !operation.deadline.compare_exchange_weak(before, until)) {
    }
    if (until < before) operation.timeout = timeout;
  }
  if (driven_engine == this) return drive(&operation);
  std::unique_lock lock(mutex_);
  while (!operation.is_done()) {
    if (is_driven_) {
      ++num_waiting_;
      shared_.rank(options_.rank).doorbell.ring();  // stops a background driver
      changed_.wait(lock, [&] { return !is_driven_ || operation.is_done(); });
      --num_waiting_;
      continue;
    }
    drive_unlocked(lock, [&] { drive(&operation); });
  }
}

size_t Engine::own_resident_bytes() const {
  // Asking the system takes tens of microseconds, and a memory timeline asks for every phase. This
  // rank's operations and scratch memory make pages of its ranges resident; so may a peer that
  // reads the header of a ring for the first time, which counts from the next operation on. In a
  // forked child the mutex may stay locked, and the segment is not mapped.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  const bool is_idle = lock.owns_lock() && fork_generation() == fork_generation_ && !is_driven_ &&
                       num_unfinished_ == 0 && !is_scratch_acquired_;
  if (is_idle && resident_.num_begun == num_begun_) return resident_.num_bytes;
  size_t num_bytes = 0;
  for (const auto& range : shared_.ranges_written_by(options_.rank)) {
    num_bytes += membership_.segment.resident_bytes(range.first, range.size);
  }
  if (is_idle) resident_ = {num_begun_, num_bytes};
  return num_bytes;
}

void Engine::poll() {
  std::unique_lock lock(mutex_);
  if (is_driven_ || fork_generation() != fork_generation_) return;
  drive_unlocked(lock, [this] { advance(); });
}

void Engine::run_in_background() {
  std::unique_lock lock(mutex_);
  int num_idle_polls = 0;
  while (!has_left_) {
    num_idle_polls = num_unfinished_ == 0 ? num_idle_polls + 1 : 0;
    if (num_idle_polls > kIdlePollsBeforeSleep) {
      background_sleeps_ = true;
      background_wakes_.wait(lock, [&] { return !background_sleeps_; });
    }
    background_wakes_.wait_for(lock, kBackgroundPollInterval);
    if (has_left_ || is_driven_ || num_unfinished_ == 0 || num_waiting_ > 0) continue;
    drive_unlocked(lock, [this] { drive(nullptr); });
  }
}

// Drives until `until` is done; if `until` is null, until nothing is pending, another thread waits,
// or this rank has left the group.
void Engine::drive(const Operation* until) {
  Doorbell& doorbell = shared_.rank(options_.rank).doorbell;
  const auto is_over = [&] {
    if (until != nullptr) return until->is_done();
    return num_unfinished_ == 0 || num_waiting_ > 0 || has_left_;
  };
  const bool is_background = until == nullptr;
  // The background thread does not spin or yield: it leaves the processor to threads that compute.
  const int num_spins = CrowdedGroup::exists() ? kSpinsIfCrowded : kSpins;
  Backoff backoff(is_background ? 0 : num_spins,
                  is_background ? std::chrono::microseconds{0} : kYieldTime);
  if (!is_background) publish_processor(shared_, options_.rank);
  next_check_ = Clock::now() + kCheckInterval;
  Clock::time_point now;
  const auto read_clock = [&] { return now = Clock::now(); };
  while (!is_over()) {
    if (advance()) {
      backoff.reset();
      continue;
    }
    const auto step =
        backoff.next([&] { return shares_processor(shared_, options_.rank); }, read_clock);
    if (step == Backoff::Step::kSpin) {
      pause();
      continue;
    }
    // Check before each yield: a yield may last a time slice on a busy machine.
    if (now >= next_check_) {
      next_check_ = now + kCheckInterval;
      check_health();
      continue;
    }
    if (step == Backoff::Step::kYield) {
      sched_yield();
      publish_processor(shared_, options_.rank);
      continue;
    }
    const uint32_t num_rings = doorbell.start_listening();
    if (!advance() && !is_over()) doorbell.sleep(num_rings, kCheckInterval);
    doorbell.stop_listening();
    if (!is_background) publish_processor(shared_, options_.rank);
  }
}

void Engine::take_inbox() {
  if (!has_inbox_.load()) return;
  std::vector<OperationPtr> taken;
  {
    const std::lock_guard lock(mutex_);
    taken.swap(inbox_);
    has_inbox_.store(false);
    if (scratch_operation_) {
      // The collectives submitted since acquire_scratch() wait for this operation.
      collectives_.push_front(
          std::dynamic_pointer_cast<Collective>(std::exchange(scratch_operation_, nullptr)));
      is_scratch_acquired_ = false;
    }
  }
  for (OperationPtr& operation : taken) {
    if (auto collective = std::dynamic_pointer_cast<Collective>(operation)) {
      collectives_.push_back(std::move(collective));
    } else {
      messages_.post(std::dynamic_pointer_cast<Message>(operation));
    }
  }
}

void Engine::finish(Operation& operation, const std::exception_ptr& error) {
  operation.finish(error);
  --num_unfinished_;
}

bool Engine::advance_collectives() {
  bool moved = false;
  while (!collectives_.empty() && !is_scratch_acquired_) {
    const CollectivePtr first = collectives_.front();
    if (!first->advance(shared_, options_.rank, cursor_)) break;
    collectives_.pop_front();
    finish(*first, nullptr);
    moved = true;
  }
  return moved;
}

bool Engine::advance_messages() {
  std::vector<MessagePtr> ended;
  const auto finish_ended = [&] {
    for (const MessagePtr& message : ended) finish(*message, nullptr);
  };
  bool moved = false;
  try {
    moved = messages_.advance(ended);
  } catch (...) {
    finish_ended();
    throw;
  }
  finish_ended();
  return moved;
}

bool Engine::advance() {
  take_inbox();
  if (num_unfinished_ == 0) return false;
  if (auto error = failure()) {
    fail_all(error);
    return true;
  }
  bool moved = false;
  try {
    moved = advance_collectives();
    moved |= advance_messages();
  } catch (const CollectiveMismatchError& error) {
    fail_all(fail(ErrorKind::kMismatch, mismatch_message(options_.name, error.what())));
    moved = true;
  } catch (const std::exception& error) {
    fail_all(fail(ErrorKind::kAborted,
                  "weft: rank " + std::to_string(options_.rank) + " of group '" + options_.name +
                      "' failed inside an operation: " + error.what()));
    moved = true;
  }
  if (has_left_ && num_unfinished_ > 0) {
    fail_all(std::make_exception_ptr(
        GroupAbortedError("weft: rank " + std::to_string(options_.rank) + " left group '" +
                          options_.name + "' before this operation was done")));
    moved = true;
  }
  if (moved && num_waiting_ > 0) {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
  return moved;
}

void Engine::abort(const std::string& why) {
  if (fork_generation() != fork_generation_) return;
  fail(ErrorKind::kAborted,
       "weft: rank " + std::to_string(options_.rank) + " aborted group '" + options_.name + "'" +
           (why.empty() ? "" : ": " + why));
  poll();
}

void Engine::fail_with_mismatch(const std::string& text) {
  if (fork_generation() != fork_generation_) return;
  fail(ErrorKind::kMismatch, text);
  poll();
}

void Engine::leave() {
  if (fork_generation() != fork_generation_ || has_left_.exchange(true)) return;
  shared_.rank(options_.rank).state.store(RankState::kLeft);
  for (int rank = 0; rank < options_.size; ++rank) shared_.rank(rank).doorbell.ring();
  poll();  // fails the unfinished operations, unless the driver, woken above, does so
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
  background_sleeps_ = false;
  background_wakes_.notify_one();
}

std::shared_ptr<Engine> make_engine(const Store& store, const GroupOptions& options) {
  const unsigned generation = fork_generation();
  return {new Engine(store, options), [generation](Engine* engine) {
            if (fork_generation() == generation) delete engine;
          }};
}

}  // namespace weft::collectives
