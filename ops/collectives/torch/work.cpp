#include "work.h"

#include "flight_log.h"
#include "fork_guard.h"
#include "raise.h"
#include "slow_network.h"
#include "task_threads.h"

#include <ATen/core/ivalue.h>

#include <thread>
#include <utility>

namespace weft::collectives {

namespace {

// A callback chained to a future may wait for another future, so it never runs on a thread that
// carries out operations.
void complete_on_task_thread(std::function<void()> complete) {
  static std::mutex mutex;
  static TaskThreads* threads = nullptr;  // never destroyed: a callback may run at process exit
  static unsigned threads_generation = 0;
  const std::lock_guard lock(mutex);
  if (threads == nullptr || threads_generation != fork_generation()) {
    threads = new TaskThreads;
    threads_generation = fork_generation();
  }
  threads->run(std::move(complete));
}

thread_local double waited_seconds = 0;
thread_local bool is_waiting = false;

// Adds its lifetime to waited_seconds, unless another one of this thread does.
class Waiting {
 public:
  Waiting()
      : is_outermost_(!std::exchange(is_waiting, true)), start_(std::chrono::steady_clock::now()) {}
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  ~Waiting() {
    if (!is_outermost_) return;
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start_;
    waited_seconds += waited.count();
    is_waiting = false;
  }

 private:
  const bool is_outermost_;
  const std::chrono::steady_clock::time_point start_;
};

}  // namespace

double seconds_waited_by_thread() { return waited_seconds; }

CollectiveWork::CollectiveWork(std::shared_ptr<Group> group,
                               int rank,
                               c10d::OpType op_type,
                               const char* title,
                               const std::vector<at::Tensor>& inputs,
                               std::vector<at::Tensor> outputs,
                               std::shared_ptr<const CompletionHooks> hooks,
                               uint64_t log_id)
    : Work(rank, op_type, title, inputs),
      group_(std::move(group)),
      completion_(std::make_shared<Completion>()) {
  completion_->outputs = std::move(outputs);
  completion_->end_of_profile = recordFunctionEndCallback_;
  completion_->hooks = std::move(hooks);
  completion_->log_id = log_id;
}

void CollectiveWork::add(const OperationPtr& operation) {
  ++completion_->num_unfinished;
  operations_.push_back(operation);
  operation->on_done = [first = std::move(operation->on_done),
                        completion = completion_](std::exception_ptr error) {
    try {
      if (first) first(error);
    } catch (...) {
      error = std::current_exception();
    }
    on_operation_done(completion, error);
    if (error != nullptr) std::rethrow_exception(error);
  };
}

void CollectiveWork::on_operation_done(const std::shared_ptr<Completion>& completion,
                                       const std::exception_ptr& operation_error) {
  const std::lock_guard lock(completion->mutex);
  if (completion->error == nullptr) completion->error = operation_error;
  if (--completion->num_unfinished > 0) return;
  const bool is_done = completion->error == nullptr;
  completion->end = is_done && completion->delay.count() > 0
                        ? PretendedLink::instance().send(completion->delay)
                        : std::chrono::steady_clock::now();
  FlightLog::instance().end(completion->log_id,
                            is_done ? FlightLog::State::kDone : FlightLog::State::kFailed);
  if (is_done) {
    completion->hooks->call(completion->log_id,
                            std::chrono::steady_clock::now() - completion->begin);
  }
  if (completion->end_of_profile) std::exchange(completion->end_of_profile, nullptr)();
  if (!completion->future) return;
  complete_on_task_thread(
      [completion, future = completion->future] { completion->complete(*future); });
}

void CollectiveWork::Completion::complete(c10::ivalue::Future& to_complete) const {
  if (delay.count() > 0 && error == nullptr) std::this_thread::sleep_until(end);
  if (error != nullptr) {
    to_complete.setError(make_storable(error));
  } else {
    to_complete.markCompleted(c10::IValue(outputs));
  }
}

// True from the calls of the completion hooks on: a hook that is not called for a work because it
// is registered too late sees that the work is done.
bool CollectiveWork::is_done() const {
  const std::lock_guard lock(completion_->mutex);
  return completion_->num_unfinished == 0;
}

std::exception_ptr CollectiveWork::first_error() const {
  const std::lock_guard lock(completion_->mutex);
  return completion_->error;
}

bool CollectiveWork::isCompleted() {
  if (!is_done()) group_->poll();
  if (!is_done() || completion_->delay.count() == 0) return is_done();
  return std::chrono::steady_clock::now() >= end();
}

std::chrono::steady_clock::time_point CollectiveWork::end() const {
  const std::lock_guard lock(completion_->mutex);
  return completion_->error == nullptr ? completion_->end : completion_->begin;
}

bool CollectiveWork::isSuccess() const { return is_done() && first_error() == nullptr; }

std::exception_ptr CollectiveWork::exception() const { return make_storable(first_error()); }

int CollectiveWork::sourceRank() const {
  const auto* message = dynamic_cast<const Message*>(operations_.at(0).get());
  TORCH_CHECK(message != nullptr,
              "weft: got sourceRank() on a collective's work; call it on the work of a receive");
  return message->source();
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  const Waiting waiting;
  for (const OperationPtr& operation : operations_) group_->wait(*operation, timeout);
  // Another thread completes the future, which the caller may read next.
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(completion_->mutex);
    future = completion_->future;
  }
  if (future) future->wait();
  if (completion_->delay.count() > 0) std::this_thread::sleep_until(end());
  if (auto error = first_error()) raise(std::move(error));
  return true;
}

void CollectiveWork::abort() { group_->abort("its work was aborted"); }

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  const std::lock_guard lock(completion_->mutex);
  if (!completion_->future) {
    completion_->future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (completion_->num_unfinished == 0 && completion_->delay.count() == 0) {
      completion_->complete(*completion_->future);
    } else if (completion_->num_unfinished == 0) {
      complete_on_task_thread([completion = completion_, future = completion_->future] {
        completion->complete(*future);
      });
    }
  }
  return completion_->future;
}

}  // namespace weft::collectives
