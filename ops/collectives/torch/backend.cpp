// Joining, splitting and leaving a group.
#include "backend.h"

#include "backend_transport.h"
#include "fork_safe_mutex.h"
#include "host_copy.h"
#include "message_checks.h"
#include "multi_host_group.h"
#include "raise.h"
#include "work.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <mutex>
#include <utility>

namespace weft::collectives {

namespace {

Store view_of(const c10::intrusive_ptr<c10d::Store>& store) {
  return {[store](const std::string& key, const std::string& value) {
            store->set(key, std::vector<uint8_t>(value.begin(), value.end()));
          },
          [store](const std::string& key, std::chrono::milliseconds timeout) {
            store->wait({key}, timeout);
            const std::vector<uint8_t> value = store->get(key);
            return std::string(value.begin(), value.end());
          },
          [store](const std::string& key) {
            try {
              store->deleteKey(key);
            } catch (const std::exception&) {
              // A store that cannot delete keeps the key, which matters only to a later group
              // with the same keys.
            }
          },
          [store](const std::string& key) { return store->check({key}); },
          [store] { return view_of(store->clone()); }};
}

// The groups of this process: leave_all_groups() leaves them when the process exits.
class LiveGroups {
 public:
  static LiveGroups& instance() {
    // NOTE: never destroyed: a group may outlive the static objects.
    static auto* const groups = new LiveGroups;
    return *groups;
  }

  void add(const std::shared_ptr<Group>& group) {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const Member& each) { return each.group.expired(); });
    groups_.push_back({group});
  }

  // Leaves a group; works may keep it alive.
  void leave(const std::shared_ptr<Group>& group) {
    {
      const std::lock_guard lock(mutex_);
      for (Member& each : groups_) {
        const bool is_same = !each.group.owner_before(group) && !group.owner_before(each.group);
        if (is_same) each.is_left = true;
      }
    }
    group->leave();
  }

  // The failures of the groups that this process has not left.
  std::vector<std::exception_ptr> failures() {
    std::vector<std::exception_ptr> result;
    for (const auto& group : live_groups(false)) {
      if (auto error = group->failure()) result.push_back(std::move(error));
    }
    return result;
  }

  void leave_all() {
    for (const auto& group : live_groups()) leave(group);
  }

  size_t own_resident_bytes() {
    size_t num_bytes = 0;
    for (const auto& group : live_groups()) num_bytes += group->own_resident_bytes();
    return num_bytes;
  }

 private:
  struct Member {
    std::weak_ptr<Group> group;
    bool is_left = false;
  };

  std::vector<std::shared_ptr<Group>> live_groups(bool with_left = true) {
    std::vector<std::shared_ptr<Group>> groups;
    const std::lock_guard lock(mutex_);
    for (const Member& each : groups_) {
      if (each.is_left && !with_left) continue;
      if (auto group = each.group.lock()) groups.push_back(std::move(group));
    }
    return groups;
  }

  std::mutex& mutex_ = fork_safe_mutex<LiveGroups>();
  std::vector<Member> groups_;
};

std::shared_ptr<Group> join(const c10::intrusive_ptr<c10d::Store>& store,
                            int rank,
                            int size,
                            const ops::BackendOptions& options) {
  GroupOptions group;
  group.name = options.group_name;
  group.rank = rank;
  group.size = size;
  group.timeout = options.timeout;
  group.staging_limit_bytes = options.staging_limit_bytes;
  for (const uint64_t each : options.global_ranks_in_group) {
    group.global_ranks.push_back(static_cast<int>(each));
  }
  MakeTransport make_transport;
  if (options.make_transport) {
    make_transport = [&](const std::string& name) {
      const auto own_store = c10::make_intrusive<c10d::PrefixStore>(name, store);
      return transport_over(options.make_transport(own_store, rank, size, options.timeout));
    };
  }
  try {
    auto joined = collectives::join_group(view_of(store), group, make_transport);
    LiveGroups::instance().add(joined);
    return joined;
  } catch (const CollectiveError&) {
    raise(std::current_exception());
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, error.what());
  }
}

std::shared_ptr<const FlightLog::GroupFacts> facts_of(const ops::BackendOptions& options,
                                                      int size) {
  FlightLog::GroupFacts facts{options.group_name, {}};
  const auto& global_ranks = options.global_ranks_in_group;
  for (size_t rank = 0; rank < static_cast<size_t>(size); ++rank) {
    facts.global_ranks.push_back(
        static_cast<int>(global_ranks.empty() ? rank : global_ranks.at(rank)));
  }
  return std::make_shared<const FlightLog::GroupFacts>(std::move(facts));
}

}  // namespace

WeftBackend::WeftBackend(const c10::intrusive_ptr<c10d::Store>& store,
                         int rank,
                         int size,
                         c10::intrusive_ptr<ops::BackendOptions> options)
    : Backend(rank, size),
      options_(std::move(options)),
      group_(join(store, rank, size, *options_)),
      group_facts_(facts_of(*options_, size)) {}

// Works may keep the group alive; this rank leaves the group nevertheless.
WeftBackend::~WeftBackend() { LiveGroups::instance().leave(group_); }

void WeftBackend::abort() { group_->abort(""); }

void WeftBackend::shutdown() { LiveGroups::instance().leave(group_); }

c10d::ErrorType WeftBackend::getError() {
  const std::exception_ptr failure = group_->failure();
  if (failure == nullptr) return c10d::ErrorType::SUCCESS;
  try {
    std::rethrow_exception(failure);
  } catch (const CollectiveTimeoutError&) {
    return c10d::ErrorType::TIMEOUT;
  } catch (const PeerLostError&) {
    return c10d::ErrorType::REMOTE_ERROR;
  } catch (...) {
    return c10d::ErrorType::COMM_ERROR;
  }
}

c10::intrusive_ptr<c10d::Backend> WeftBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& opts) {
  const auto own = std::ranges::find(ranks, getRank());
  if (own == ranks.end()) return nullptr;
  auto options = c10::make_intrusive<ops::BackendOptions>(*options_);
  if (opts) {
    options->timeout = opts->timeout;
    options->group_name = opts->group_name;
  }
  const auto& parents = options_->global_ranks_in_group;
  options->global_ranks_in_group.clear();
  for (const int rank : ranks) {
    const auto index = static_cast<size_t>(rank);
    options->global_ranks_in_group.push_back(parents.empty() ? index : parents.at(index));
  }
  return ops::make_backend(store,
                           static_cast<int>(own - ranks.begin()),
                           static_cast<int>(ranks.size()),
                           std::move(options));
}

}  // namespace weft::collectives

namespace weft::collectives {

// Compare names: torch's wrapper forwards the name and every message, but has another type.
bool compares_message_sizes(c10d::ProcessGroup& group) {
  return group.getBackend(at::kCPU)->getBackendName() == WeftBackend::kName;
}

bool fail_group(c10d::ProcessGroup& group, const std::string& text) {
  if (!group.hasBackends()) return false;
  const auto backend = group.getBackend(at::kCPU);
  auto* const ours = dynamic_cast<WeftBackend*>(backend.get());
  if (ours == nullptr) return false;
  ours->fail_with_mismatch(text);
  return true;
}

}  // namespace weft::collectives

namespace weft::ops {

namespace {

// A lookup throws for unknown names; c10d::is_process_group_registered is newer than torch 2.11.
bool names_a_group(const std::string& name) {
  try {
    return c10d::resolve_process_group(name).defined();
  } catch (const c10::Error&) {
    return false;
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank,
                                               int size,
                                               c10::intrusive_ptr<BackendOptions> options) {
  TORCH_CHECK_VALUE(size > 0 && rank >= 0 && rank < size,
                    "weft: got rank ",
                    rank,
                    " of ",
                    size,
                    "; pass a rank from 0 to one less than the size");
  return c10::make_intrusive<collectives::WeftBackend>(store, rank, size, std::move(options));
}

c10::intrusive_ptr<c10d::ProcessGroup> make_group(const std::string& name,
                                                  const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank,
                                                  int size,
                                                  c10::intrusive_ptr<BackendOptions> options) {
  TORCH_CHECK_VALUE(
      !name.empty(),
      "weft: got an empty name for a group of ",
      size,
      " ranks; pass a name, because \"\" names the group of one, which always exists");
  TORCH_CHECK_VALUE(
      !names_a_group(name),
      "weft: got the name '",
      name,
      "', which a group of this process has; pass another name, or release this one with "
      "c10d::unregister_process_group");
  const auto own_store = c10::make_intrusive<c10d::PrefixStore>("weft/" + name, store);
  options->group_name = name;
  const auto backend = make_backend(own_store, rank, size, std::move(options));
  auto group = c10::make_intrusive<c10d::ProcessGroup>(own_store, rank, size);
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  group->setGroupName(name);
  c10d::register_process_group(name, group);
  return group;
}

std::size_t shared_memory_bytes() {
  return collectives::LiveGroups::instance().own_resident_bytes();
}

std::vector<LoggedCall> flight_log() {
  using Log = collectives::FlightLog;
  const auto seconds = [](Log::Time time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count();
  };
  const auto text_of = [](Log::State state) {
    if (state == Log::State::kStarted) return "started";
    return state == Log::State::kDone ? "done" : "failed";
  };
  std::vector<LoggedCall> result;
  for (const Log::Entry& entry : Log::instance().entries()) {
    const bool is_over = entry.state != Log::State::kStarted;
    result.push_back({entry.call.group->name,
                      entry.call.group->global_ranks,
                      entry.call.sequence,
                      entry.call.describe(),
                      entry.call.num_bytes,
                      text_of(entry.state),
                      seconds(entry.begin),
                      is_over ? std::optional(seconds(entry.end)) : std::nullopt});
  }
  return result;
}

std::vector<std::string> failures_of_groups() {
  std::vector<std::string> texts;
  for (const std::exception_ptr& failure : collectives::LiveGroups::instance().failures()) {
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      texts.emplace_back(error.what());
    }
  }
  return texts;
}

double seconds_waited() { return collectives::seconds_waited_by_thread(); }

void leave_all_groups() {
  stop_copy_threads();
  collectives::LiveGroups::instance().leave_all();
}

}  // namespace weft::ops
