#include "task_threads.h"

#include <utility>

namespace weft::collectives {

TaskThreads::~TaskThreads() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void TaskThreads::run(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  if (num_idle_ < tasks_.size()) threads_.emplace_back([this] { work(); });
  changed_.notify_one();
}

void TaskThreads::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (tasks_.empty()) {
      if (is_stopping_) return;
      ++num_idle_;
      changed_.wait(lock, [&] { return is_stopping_ || !tasks_.empty(); });
      --num_idle_;
      continue;
    }
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // without the lock: destructors of its captures may wait for another thread
    lock.lock();
  }
}

}  // namespace weft::collectives
