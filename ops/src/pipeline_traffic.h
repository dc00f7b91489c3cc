#pragma once

#include "pipeline_message.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

namespace weft::ops {

// The sequence numbers of this process's messages, and the messages in flight, for all groups.
// Thread-safe.
class Traffic {
 public:
  using Message = c10::intrusive_ptr<PipelineMessage>;

  static Traffic& instance() {
    static auto* const traffic = new Traffic();  // outlives every group
    return *traffic;
  }

  std::uint64_t next_sequence(const PipelineAddress& address, PipelineMessage::Side side) {
    const std::lock_guard lock(mutex_);
    std::erase_if(counters_, [](const auto& entry) { return entry.second.group.expired(); });
    const auto key = std::tuple(address.group.get(), address.peer, address.channel, side);
    auto found = counters_.find(key);
    if (found == counters_.end()) {
      found = counters_.emplace(key, Counter{GroupRef(address.group), 0}).first;
    }
    return found->second.next++;
  }

  // Returns the messages of `group` that may be in flight.
  std::vector<Message> unfinished(const ProcessGroupPtr& group) {
    const std::lock_guard lock(mutex_);
    std::vector<Message> messages;
    std::ranges::copy_if(unfinished_, std::back_inserter(messages), [&](const auto& message) {
      return message->address().group == group;
    });
    return messages;
  }

  // Drops the messages for which `is_over` returns true.
  template <typename IsOver>
  void release(const IsOver& is_over) {
    std::list<Message> released;  // destroyed without the lock
    const std::lock_guard lock(mutex_);
    for (auto message = unfinished_.begin(); message != unfinished_.end();) {
      const auto next = std::next(message);
      if (is_over(**message)) {
        released.splice(released.end(), unfinished_, message);
      }
      message = next;
    }
  }

  void add(const Message& message) {
    const std::lock_guard lock(mutex_);
    unfinished_.push_back(message);
  }

 private:
  using GroupRef = c10::weak_intrusive_ptr<c10d::ProcessGroup>;
  struct Counter {
    GroupRef group;  // keeps the address, which is part of the key, from being reused
    std::uint64_t next;
  };

  std::mutex mutex_;
  std::map<std::tuple<c10d::ProcessGroup*, int, std::int64_t, PipelineMessage::Side>, Counter>
      counters_;
  std::list<Message> unfinished_;
};

}  // namespace weft::ops
