#pragma once

// The newest calls of this process in all its groups, for a report after a failure. A call costs
// two locks of a mutex and two reads of the clock; no memory is allocated.
//
// Thread-safe.

#include "fork_safe_mutex.h"
#include "messages.h"
#include "signature.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace weft::collectives {

class FlightLog {
 public:
  static constexpr size_t kCapacity = 512;  // 100 KiB
  enum class State : uint8_t { kStarted, kDone, kFailed };
  using Time = std::chrono::system_clock::time_point;

  // The group of a call.
  struct GroupFacts {
    std::string name;
    std::vector<int> global_ranks;  // by rank of the group
  };

  // The facts of a call, which are formatted only for a report.
  struct Call {
    std::shared_ptr<const GroupFacts> group;
    uint64_t sequence = 0;   // of the group's collectives, from 1; 0: a message
    SignatureHeader header;  // of a collective; of a coalesced call: of its first tensor
    // If the call is a message:
    Message::Direction direction = Message::Direction::kSend;
    int peer = 0;  // rank of the group, or kAnySource
    int tag = 0;
    uint64_t num_bytes = 0;

    std::string describe() const;
  };

  struct Entry {
    uint64_t id = 0;  // from 1, over all calls of this process
    Call call;
    State state = State::kStarted;
    Time begin;
    Time end;  // unless kStarted
  };

  static FlightLog& instance();

  // Adds a call and returns its id. Replaces the oldest entry.
  uint64_t begin(Call call);
  // Does nothing if a newer call has replaced the entry.
  void end(uint64_t id, State state);
  // Returns the entries, the oldest first.
  std::vector<Entry> entries() const;

 private:
  std::mutex& mutex_ = fork_safe_mutex<FlightLog>();
  uint64_t num_calls_ = 0;
  std::array<Entry, kCapacity> entries_;  // call `id` is at id % kCapacity
};

}  // namespace weft::collectives
