#include "host_copy.h"

#include "../per_group.h"
#include "fork_guard.h"

#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace weft::ops {

namespace {

std::atomic<HostCopy (*)(const at::Tensor&)> start_on_cuda{nullptr};

struct Task {
  std::function<void()> wait;
  std::function<void(std::exception_ptr)> finish;
};

// A thread that runs tasks one after another. It lives as long as the process.
class CopyThread {
 public:
  explicit CopyThread(const c10::Device& device) {
    std::thread([this, device] { work(device); }).detach();
  }

  void run(Task task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

  void stop() {
    const std::lock_guard lock(finishing_);
    is_stopped_ = true;
  }

 private:
  [[noreturn]] void work(const c10::Device& device) {
    const c10::DeviceGuard guard(device);  // otherwise waits would create a context on device 0
    while (true) {
      auto task = next();
      std::exception_ptr failure;
      try {
        task.wait();
      } catch (...) {
        failure = std::current_exception();
      }
      std::unique_lock lock(finishing_);
      while (is_stopped_) {
        stopped_.wait(lock);
      }
      task.finish(failure);
      task = {};
    }
  }

  Task next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !tasks_.empty(); });
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    return task;
  }

  std::mutex mutex_;  // guards tasks_
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::mutex finishing_;  // held while a task finishes and is destroyed
  std::condition_variable stopped_;
  bool is_stopped_ = false;
};

struct CopyThreads {
  const unsigned generation = collectives::fork_generation();
  std::mutex mutex;
  std::map<c10::DeviceIndex, CopyThread> by_device;
};

}  // namespace

HostCopy start_copy_to_host(const at::Tensor& tensor) {
  const auto start = start_on_cuda.load();
  if (tensor.is_cuda() && start != nullptr) {
    return start(tensor);
  }
  return {tensor.cpu(), {}};
}

void run_on_copy_thread(const c10::Device& device,
                        std::function<void()> wait,
                        std::function<void(std::exception_ptr)> finish) {
  auto& threads = process_wide<CopyThreads>();
  const std::lock_guard lock(threads.mutex);
  const auto thread = threads.by_device.try_emplace(device.index(), device).first;
  thread->second.run({std::move(wait), std::move(finish)});
}

void stop_copy_threads() {
  auto& threads = process_wide<CopyThreads>();
  if (collectives::fork_generation() != threads.generation) {
    return;  // a forked process has no copy threads
  }
  const std::lock_guard lock(threads.mutex);
  for (auto& [device, thread] : threads.by_device) {
    thread.stop();
  }
}

void set_cuda_host_copy(HostCopy (*start)(const at::Tensor& tensor)) { start_on_cuda = start; }

}  // namespace weft::ops
