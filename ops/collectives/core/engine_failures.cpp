// How an engine detects failures, reports them to all ranks and ends the pending operations.
#include "engine.h"
#include "fork_guard.h"
#include "format.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace weft::collectives {

namespace {

std::exception_ptr as_exception(const CollectiveError& error) {
  try {
    throw_error(error.kind(), error.what());
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

std::exception_ptr Engine::failure() const {
  if (fork_generation() != fork_generation_)
    return nullptr;  // a forked child does not have the shared memory
  const FailureRecord& record = shared_.control().failure;
  if (!record.is_set()) return nullptr;
  return as_exception(record.get());
}

std::exception_ptr Engine::fail(ErrorKind kind, const std::string& text) {
  const CollectiveError error = shared_.control().failure.record(kind, text);
  for (int rank = 0; rank < options_.size; ++rank) shared_.rank(rank).doorbell.ring();
  return as_exception(error);
}

void Engine::fail_all(const std::exception_ptr& error) {
  take_inbox();
  std::vector<OperationPtr> all(collectives_.begin(), collectives_.end());
  collectives_.clear();
  for (MessagePtr& message : messages_.take_all()) all.push_back(std::move(message));
  for (const OperationPtr& operation : all) finish(*operation, error);
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

std::exception_ptr Engine::fail_lost(int peer, const char* how, const std::string& what) {
  return fail(ErrorKind::kPeerLost,
              "weft: " + name_of_rank(shared_, peer) + " of group '" + options_.name + "' " + how +
                  " while rank " + std::to_string(options_.rank) + " waited for it in " + what +
                  "; see that rank's output for the cause");
}

// The order matters: a peer that leaves and ends between the two checks counts as having left.
bool Engine::ended_without_leaving(int peer) const {
  return peers_.has_ended(peer) && shared_.rank(peer).state.load() != RankState::kLeft;
}

void Engine::check_peers(const std::string& what) {
  for (int peer = 0; peer < options_.size; ++peer) {
    if (peer != options_.rank && ended_without_leaving(peer)) fail_lost(peer, "ended", what);
  }
}

// Checks for lost peers and passed deadlines. A peer that left the group is an error only for ranks
// that still need it; a peer that ended without leaving is an error for all.
void Engine::check_health() {
  if (collectives_.empty() && messages_.is_idle()) return;
  std::vector<bool> has_left;
  has_left.reserve(static_cast<size_t>(options_.size));
  for (int peer = 0; peer < options_.size; ++peer) {
    has_left.push_back(shared_.rank(peer).state.load() == RankState::kLeft);
  }
  advance();  // processes what peers wrote before they left
  if (collectives_.empty() && messages_.is_idle()) return;

  const bool has_collective = !collectives_.empty();
  const std::string what = has_collective ? collectives_.front()->describe() + " (collective " +
                                                std::to_string(cursor_.sequence) + " of the group)"
                                          : "point-to-point messages";
  const bool have_all_left = std::ranges::count(has_left, true) >= options_.size - 1;
  const auto needs = [&](int peer) {
    return (has_collective && !cursor_.barrier.has_arrived(peer)) || messages_.needs(peer) ||
           (have_all_left && messages_.needs_any_source());
  };
  for (int peer = 0; peer < options_.size; ++peer) {
    if (peer == options_.rank) continue;
    const bool left = has_left[static_cast<size_t>(peer)];
    if (left ? !needs(peer) : !ended_without_leaving(peer)) continue;
    return fail_all(fail_lost(peer, left ? "left the group" : "ended", what));
  }
  const auto now = std::chrono::steady_clock::now();
  const auto late = std::ranges::find_if(
      collectives_, [&](const CollectivePtr& each) { return each->deadline.load() <= now; });
  if (late != collectives_.end()) return fail_late(**late);
  if (const MessagePtr message = messages_.find_late(now)) fail_late(*message);
}

Engine::LateRanks Engine::late_ranks() const {
  LateRanks late;
  const auto add = [&](const std::string& name) {
    late.text += (late.text.empty() ? ": not arrived " : ", ") + name;
  };
  const uint64_t own = shared_.rank(options_.rank).num_arrivals.load(std::memory_order_acquire);
  for (int rank = 0; rank < options_.size; ++rank) {
    const RankBlock& block = shared_.rank(rank);
    const int remote = block.waits_for.load(std::memory_order_relaxed);
    if (remote != RankBlock::kNoRank) {
      add("rank " + std::to_string(remote) + " (on another host)");
    } else if (block.num_arrivals.load(std::memory_order_acquire) < own) {
      add(name_of_rank(shared_, rank));
      late.has_local = true;
    }
  }
  return late;
}

void Engine::fail_late(const Operation& operation) {
  std::ostringstream text;
  text << "weft: " << operation.describe() << " of group '" << options_.name << "' timed out after "
       << in_seconds(operation.timeout) << " s on rank " << options_.rank;
  if (dynamic_cast<const Collective*>(&operation) != nullptr) {
    const Collective& first = *collectives_.front();
    if (&first != &operation) text << ", behind " << first.describe();
    text << " (collective " << first.sequence() << " of the group)";
    for (const bool has_arrived : {true, false}) {
      std::string ranks;
      for (int rank = 0; rank < options_.size; ++rank) {
        if (cursor_.barrier.has_arrived(rank) == has_arrived) {
          ranks += (ranks.empty() ? "" : ", ") + name_of_rank(shared_, rank);
          const int remote = shared_.rank(rank).waits_for.load(std::memory_order_relaxed);
          if (!has_arrived && remote != RankBlock::kNoRank) {
            ranks += ", which waits for rank " + std::to_string(remote) + " (on another host)";
          }
        }
      }
      text << (has_arrived ? ": arrived " : "; not arrived ") << (ranks.empty() ? "none" : ranks);
    }
  }
  text << "; see what the late ranks do, or raise the timeout of the group or the call";
  fail_all(fail(ErrorKind::kTimeout, text.str()));
}

}  // namespace weft::collectives
