#include "flight_log.h"

#include <sstream>
#include <utility>

namespace weft::collectives {

FlightLog& FlightLog::instance() {
  // NOTE: never destroyed: a call may end while the process exits.
  static auto* const log = new FlightLog;
  return *log;
}

uint64_t FlightLog::begin(Call call) {
  const auto now = std::chrono::system_clock::now();
  const std::lock_guard lock(mutex_);
  const uint64_t id = ++num_calls_;
  entries_[id % kCapacity] = {id, std::move(call), State::kStarted, now, {}};
  return id;
}

void FlightLog::end(uint64_t id, State state) {
  const auto now = std::chrono::system_clock::now();
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[id % kCapacity];
  if (entry.id != id || entry.state != State::kStarted) return;
  entry.state = state;
  entry.end = now;
}

std::vector<FlightLog::Entry> FlightLog::entries() const {
  const std::lock_guard lock(mutex_);
  std::vector<Entry> result;
  result.reserve(kCapacity);
  const uint64_t first = num_calls_ < kCapacity ? 1 : num_calls_ - kCapacity + 1;
  for (uint64_t id = first; id <= num_calls_; ++id) result.push_back(entries_[id % kCapacity]);
  return result;
}

std::string FlightLog::Call::describe() const {
  if (sequence > 0) return collectives::describe(Signature{header, {}, {}});
  std::ostringstream text;
  text << (direction == Message::Direction::kSend ? "send(to " : "recv(from ");
  if (peer == kAnySource) {
    text << "any rank";
  } else {
    text << "rank " << group->global_ranks.at(static_cast<size_t>(peer));
  }
  text << ", tag " << tag << ')';
  return text.str();
}

}  // namespace weft::collectives
