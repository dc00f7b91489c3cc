#pragma once

// c10d's completion hooks, by which torch's flight recorder gets the completion of a call. Releases
// of torch before 2.15 have none.

#include "fork_safe_mutex.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/headeronly/version.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#define WEFT_HAS_COMPLETION_HOOKS (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15)

namespace weft::collectives {

#if WEFT_HAS_COMPLETION_HOOKS

// The completion hooks of one group. Thread-safe.
class CompletionHooks {
 public:
  void add(int64_t hook_id, c10d::CompletionHook hook) {
    const std::lock_guard lock(mutex_);
    auto hooks = hooks_ ? *hooks_ : Hooks{};
    hooks.emplace_back(hook_id, std::move(hook));
    hooks_ = std::make_shared<const Hooks>(std::move(hooks));
    has_hooks_ = true;
  }

  void remove(int64_t hook_id) {
    const std::lock_guard lock(mutex_);
    if (!hooks_) return;
    auto hooks = *hooks_;
    std::erase_if(hooks, [&](const auto& each) { return each.first == hook_id; });
    has_hooks_ = !hooks.empty();
    hooks_ = has_hooks_ ? std::make_shared<const Hooks>(std::move(hooks)) : nullptr;
  }

  // Calls the hooks. key: of the work, see c10d::Work::getCompletionKey. An exception of a hook is
  // a warning: the call is complete nevertheless.
  void call(uint64_t key, std::chrono::duration<float, std::milli> duration) const {
    if (!has_hooks_) return;
    // A hook may block on a lock whose holder calls add() or remove(): call it without the mutex.
    std::shared_ptr<const Hooks> hooks;
    {
      const std::lock_guard lock(mutex_);
      hooks = hooks_;
    }
    if (!hooks) return;
    for (const auto& [_, hook] : *hooks) {
      try {
        hook({key, duration.count()});
      } catch (const std::exception& error) {
        TORCH_WARN("weft: a completion hook failed: ", error.what());
      }
    }
  }

 private:
  using Hooks = std::vector<std::pair<int64_t, c10d::CompletionHook>>;

  std::mutex& mutex_ = fork_safe_mutex<CompletionHooks>();  // of all groups
  std::shared_ptr<const Hooks> hooks_;                      // null: none
  std::atomic<bool> has_hooks_{false};
};

#else

class CompletionHooks {
 public:
  void call(uint64_t /*key*/, std::chrono::duration<float, std::milli> /*duration*/) const {}
};

#endif

}  // namespace weft::collectives
