#pragma once

#include "../per_group.h"
#include "message.h"

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

  static Traffic& instance() { return process_wide<Traffic>(); }

  std::uint64_t next_sequence(const PipelineAddress& address, PipelineMessage::Side side) {
    std::vector<Counters> gone;
    const std::lock_guard lock(mutex_);
    return next_.find_or_make(address.group, gone)[{address.peer, address.channel, side}]++;
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
  // By peer, channel and side.
  using Counters = std::map<std::tuple<int, std::int64_t, PipelineMessage::Side>, std::uint64_t>;

  std::mutex mutex_;
  PerGroup<Counters> next_;
  // One list for all groups: every new message drops finished messages of all groups, because
  // messages keep their group alive.
  std::list<Message> unfinished_;
};

}  // namespace weft::ops
