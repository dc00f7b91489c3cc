#pragma once

// State of this process per process group.

#include "group.h"

#include <c10/util/intrusive_ptr.h>

#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace weft::ops {

// Returns the T that the process shares. It is never destroyed, because groups and threads may use
// it after static objects are destroyed.
template <typename T>
T& process_wide() {
  static auto* const state = new T();
  return *state;
}

// Stores at most one T for each process group. Not thread-safe: the owner guards it with a mutex,
// and destroys the values that it removes only after unlocking the mutex, because their destructors
// may block.
template <typename T>
class PerGroup {
 public:
  // Returns the group's T, made at the first call. Moves the T of each destroyed group to `gone`.
  T& find_or_make(const ProcessGroupPtr& group, std::vector<T>& gone) {
    std::erase_if(entries_, [&](auto& entry) {
      const bool is_gone = entry.second.group.expired();
      if (is_gone) {
        gone.push_back(std::move(entry.second.value));
      }
      return is_gone;
    });
    return entries_.try_emplace(group.get(), group).first->second.value;
  }

  // Returns the group's T, or null.
  T* find(const ProcessGroupPtr& group) {
    const auto found = entries_.find(group.get());
    return found == entries_.end() ? nullptr : &found->second.value;
  }

  // Removes and returns the group's T.
  std::optional<T> take(const ProcessGroupPtr& group) {
    auto entry = entries_.extract(group.get());
    return entry ? std::optional(std::move(entry.mapped().value)) : std::nullopt;
  }

  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (const auto& [key, entry] : entries_) {
      visit(entry.value);
    }
  }

  void clear() { entries_.clear(); }

 private:
  struct Entry {
    explicit Entry(const ProcessGroupPtr& owner) : group(owner) {}
    // Keeps the address, the key of this entry, from being reused.
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    T value{};
  };

  std::map<const c10d::ProcessGroup*, Entry> entries_;
};

}  // namespace weft::ops
