#include "rendezvous.h"

#include "format.h"
#include "peers.h"

#include <weft/collectives/error.h>

#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <unistd.h>
#include <utility>

namespace weft::collectives {

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kSegmentKey = "segment";
constexpr const char* kNoSegment = "none ";  // followed by the reason, if there is no segment

// The interval at which a waiting rank checks whether the other ranks can still join.
constexpr std::chrono::milliseconds kCheckInterval{100};

// The interval at which a rank polls the store for the key of another rank and for a failure.
constexpr std::chrono::milliseconds kPollInterval{20};

// A store may end a wait this much before the deadline, because it reads a different clock.
constexpr std::chrono::milliseconds kClockTolerance{20};

std::string new_group_nonce() {
  std::random_device random;
  return std::to_string(random()) + std::to_string(random());
}

class Rendezvous {
 public:
  Rendezvous(const Store& store, const GroupOptions& options)
      : store_(store), options_(options), deadline_(Clock::now() + options.timeout) {}

  // Each rank publishes three lines: its group configuration, a nonce and its host identity. The
  // nonce of rank 0 becomes the group's.
  [[nodiscard]] Identities exchange_identities(bool has_transport) const {
    GroupConfig own;
    own.staging_limit_bytes = options_.staging_limit_bytes;
    own.has_transport = has_transport;
    store_.set(identity_key(options_.rank),
               own.to_string() + '\n' + new_group_nonce() + '\n' + host_identity());
    Identities identities;
    for (int rank = 0; rank < options_.size; ++rank) {
      std::istringstream published(get(identity_key(rank), rank));
      std::string config, nonce, host;
      std::getline(published, config);
      std::getline(published, nonce);
      std::getline(published, host, '\0');
      identities.configs.push_back(GroupConfig::parse(config));
      identities.hosts.push_back(host);
      if (rank == 0) identities.nonce = nonce;
    }
    return identities;
  }

  void store_barrier(const std::string& name, const std::string& failure_key) const {
    const auto key = [&](int rank) { return name + "/" + std::to_string(rank); };
    store_.set(key(options_.rank), "here");
    for (int rank = 0; rank < options_.size; ++rank) {
      while (!failure_key.empty() && !store_.has(key(rank)) && Clock::now() < deadline_) {
        if (store_.has(failure_key)) throw_failure(store_.get(failure_key, kPollInterval));
        std::this_thread::sleep_for(kPollInterval);
      }
      std::ignore = get(key(rank), rank);
    }
  }

  Membership run() {
    const SharedSizes sizes = SharedSizes::within(options_.size, options_.staging_limit_bytes);
    // Read the start time before the segment opens a file descriptor: the reading needs a free one.
    const uint64_t start_time = process_start_time(getpid());
    Membership member;
    std::string address;
    if (options_.rank == 0) {
      member.segment = create_segment(SharedState::num_bytes(sizes));
      member.shared = SharedState(member.segment.data(), sizes);
      member.shared.initialize();
      address = member.segment.address().to_string();
      store_.set(kSegmentKey, address);
    } else {
      address = get(kSegmentKey, 0);
      member.segment = open_segment(address, SharedState::num_bytes(sizes));
      member.shared = SharedState(member.segment.data(), sizes);
    }
    publish_rank(member.shared, start_time);
    finish_joining(member.shared, address);
    member.segment.close_descriptor();
    return member;
  }

 private:
  // If rank 0 cannot create the segment, it reports the cause to the ranks that wait for the
  // address.
  [[nodiscard]] Segment create_segment(size_t num_bytes) const {
    try {
      return Segment::create(num_bytes);
    } catch (const std::exception& error) {
      const std::string text = "weft: rank 0 of group '" + options_.name +
                               "' could not create shared memory (" + error.what() +
                               "); free the resource that the cause names, or create fewer groups";
      store_.set(kSegmentKey, kNoSegment + text);
      throw GroupAbortedError(text);
    }
  }

  static void throw_if_creation_failed(const std::string& value) {
    if (!value.starts_with(kNoSegment)) return;
    throw GroupAbortedError(value.substr(std::string_view(kNoSegment).size()));
  }

  // A rank that cannot open the segment reports that to rank 0, which reports it to all others:
  // through the segment to ranks that have opened it, through the store to ranks that read its
  // address later.
  [[nodiscard]] Segment open_segment(const std::string& address, size_t num_bytes) const {
    throw_if_creation_failed(address);
    std::string why;
    try {
      Segment segment = Segment::open(SegmentAddress::parse(address));
      if (segment.num_bytes() == num_bytes) return segment;
      why = "it has " + std::to_string(segment.num_bytes()) + " bytes, not " +
            std::to_string(num_bytes);
    } catch (const std::exception& error) {
      why = error.what();
    }
    // After a rank has failed to open the segment, rank 0 closes it, so later ranks fail, too. They
    // throw the first rank's error.
    throw_if_creation_failed(get(kSegmentKey, 0));
    const std::string text = "weft: rank " + std::to_string(options_.rank) + " of group '" +
                             options_.name + "' could not open the shared memory of rank 0 (" +
                             why + "); run the ranks of a host as one user in one PID namespace, " +
                             "or set a different WEFT_HOST_ID for ranks that cannot access rank 0";
    store_.set(unopened_key(address), text);
    throw GroupAbortedError(text);
  }

  static std::string identity_key(int rank) { return "host/" + std::to_string(rank); }
  static std::string unopened_key(const std::string& address) {
    return "unopened/" + std::to_string(SegmentAddress::parse(address).nonce);
  }

  // Returns the value that rank `from_rank` sets for the key; waits for it until the deadline.
  [[nodiscard]] std::string get(const std::string& key, int from_rank) const {
    const auto remaining = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
    try {
      return store_.get(key, std::max(remaining, std::chrono::milliseconds(1)));
    } catch (const std::exception& error) {
      if (Clock::now() + kClockTolerance < deadline_) {
        throw GroupAbortedError("weft: rank " + std::to_string(options_.rank) + " of group '" +
                                options_.name + "' cannot read the key '" + key + "' of rank " +
                                std::to_string(from_rank) + " from the store (" + error.what() +
                                "); check that the process that hosts the store still runs");
      }
      throw CollectiveTimeoutError("weft: rank " + std::to_string(from_rank) +
                                   " did not join group '" + options_.name + "' within " +
                                   in_seconds(options_.timeout) + " s (" + error.what() +
                                   "); see what it waits for, or raise the timeout");
    }
  }

  void publish_rank(const SharedState& shared, uint64_t start_time) const {
    RankBlock& own = shared.rank(options_.rank);
    own.pid = getpid();
    own.start_time = start_time;
    sched_getaffinity(0, sizeof own.processors, &own.processors);
    own.global_rank = options_.global_ranks.empty()
                          ? options_.rank
                          : options_.global_ranks[static_cast<size_t>(options_.rank)];
    own.state.store(RankState::kJoined, std::memory_order_release);
    shared.control().num_joined.fetch_add(1, std::memory_order_acq_rel);
  }

  // Rank 0 removes the keys from the store when all ranks have joined and so have read them, then
  // opens the group.
  void finish_joining(const SharedState& shared, const std::string& address) const {
    Control& control = shared.control();
    if (options_.rank == 0) {
      wait_for_all(shared, address, [&] {
        return control.num_joined.load(std::memory_order_acquire) ==
               static_cast<uint32_t>(options_.size);
      });
      store_.remove(kSegmentKey);
      for (int rank = 0; rank < options_.size; ++rank) store_.remove(identity_key(rank));
      control.is_open.store(true, std::memory_order_release);
    }
    wait_for_all(shared, address, [&] { return control.is_open.load(std::memory_order_acquire); });
  }

  void wait_for_all(const SharedState& shared,
                    const std::string& address,
                    const std::function<bool()>& is_complete) const {
    FailureRecord& failure = shared.control().failure;
    auto next_check = Clock::now() + kCheckInterval;
    while (!is_complete()) {
      if (Clock::now() > next_check) {
        next_check = Clock::now() + kCheckInterval;
        const auto found = find_failure(shared, address);
        if (is_complete()) return;
        if (found) failure.record(found->kind(), found->what());
      }
      if (Clock::now() > deadline_) failure.record(ErrorKind::kTimeout, late_text(shared));
      if (failure.is_set()) {
        const CollectiveError first = failure.get();
        throw_error(first.kind(), first.what());
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  // Returns an error if the process of a rank has ended since the rank joined or, on rank 0, if a
  // rank has reported that it cannot open the segment.
  [[nodiscard]] std::optional<CollectiveError> find_failure(const SharedState& shared,
                                                            const std::string& address) const {
    try {
      if (options_.rank == 0 && store_.has(unopened_key(address))) {
        const std::string text = get(unopened_key(address), 0);
        // Set before this rank closes the descriptor of the segment: a rank that then cannot open
        // the segment reads the cause.
        store_.set(kSegmentKey, kNoSegment + text);
        return GroupAbortedError(text);
      }
    } catch (const std::exception&) {
      // Without the store the cause is unknown; the deadline remains.
    }
    for (int rank = 0; rank < options_.size; ++rank) {
      const RankBlock& block = shared.rank(rank);
      const bool has_joined = block.state.load(std::memory_order_acquire) == RankState::kJoined;
      if (has_joined && process_has_ended(block.pid, block.start_time) &&
          block.state.load() == RankState::kJoined) {
        return PeerLostError("weft: " + name_of_rank(shared, rank) + " of group '" + options_.name +
                             "' ended while the group was created; see its output for the cause");
      }
    }
    return std::nullopt;
  }

  [[nodiscard]] std::string late_text(const SharedState& shared) const {
    std::ostringstream text;
    text << "weft: joining group '" << options_.name << "' timed out after "
         << in_seconds(options_.timeout) << " s; ";
    bool is_any_absent = false;
    for (int rank = 0; rank < options_.size; ++rank) {
      if (shared.rank(rank).state.load() != RankState::kAbsent) continue;
      text << (is_any_absent ? ", rank " : "not joined: rank ") << rank;
      is_any_absent = true;
    }
    if (!is_any_absent) text << "all ranks have joined, but rank 0 has not opened the group";
    text << "; see what " << (is_any_absent ? "these ranks wait" : "rank 0 waits")
         << " for, or raise the timeout";
    return text.str();
  }

  const Store& store_;
  const GroupOptions& options_;
  const Clock::time_point deadline_;
};

}  // namespace

Membership join_on_host(const Store& store, const GroupOptions& options) {
  return Rendezvous(store, options).run();
}

Identities exchange_identities(const Store& store,
                               const GroupOptions& options,
                               bool has_transport) {
  return Rendezvous(store, options).exchange_identities(has_transport);
}

void forget_identity(const Store& store, const GroupOptions& options) {
  store.remove("host/" + std::to_string(options.rank));
}

void store_barrier(const Store& store,
                   const GroupOptions& options,
                   const std::string& name,
                   const std::string& failure_key) {
  Rendezvous(store, options).store_barrier(name, failure_key);
}

std::string format_failure(const CollectiveError& error) {
  return std::to_string(static_cast<int>(error.kind())) + ' ' + error.what();
}

void throw_failure(const std::string& text) {
  const size_t space = text.find(' ');
  throw_error(static_cast<ErrorKind>(std::stoi(text.substr(0, space))), text.substr(space + 1));
}

std::string name_of_rank(const SharedState& shared, int rank) {
  const RankBlock& block = shared.rank(rank);
  std::string text = "rank " + std::to_string(rank) + " (";
  if (block.global_rank != rank) text += "global rank " + std::to_string(block.global_rank) + ", ";
  return text + "pid " + std::to_string(block.pid) + ")";
}

}  // namespace weft::collectives
