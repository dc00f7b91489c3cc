#include "rendezvous.h"

#include "peers.h"
#include "texts.h"

#include <weft/collectives/error.h>

#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <unistd.h>
#include <utility>

namespace weft::collectives {

namespace {

using Clock = std::chrono::steady_clock;

class Joining {
 public:
  Joining(const Store& store, const GroupOptions& options)
      : store_(store), options_(options), deadline_(Clock::now() + options.timeout) {}

  // A line with the host, on rank 0 followed by the nonce.
  Identities exchange_identities() const {
    std::random_device random;
    const std::string nonce = std::to_string(random()) + std::to_string(random());
    store_.set("host/" + std::to_string(options_.rank),
               options_.rank == 0 ? host_identity() + '\n' + nonce : host_identity());
    Identities identities;
    for (int rank = 0; rank < options_.size; ++rank) {
      const std::string told = get("host/" + std::to_string(rank), rank);
      identities.hosts.push_back(told.substr(0, told.find('\n')));
      if (rank == 0) identities.nonce = told.substr(told.find('\n') + 1);
    }
    return identities;
  }

  void meet(const std::string& name) const {
    store_.set(name + "/" + std::to_string(options_.rank), "here");
    for (int rank = 0; rank < options_.size; ++rank) get(name + "/" + std::to_string(rank), rank);
  }

  Membership run() {
    const SharedSizes sizes = SharedSizes::within(options_.size, options_.staging_limit_bytes);
    Membership member;
    if (options_.rank == 0) {
      member.segment = Segment::create(SharedState::num_bytes(sizes));
      member.shared = SharedState(member.segment.data(), sizes);
      member.shared.initialize();
      store_.set("segment", member.segment.address().to_string());
    } else {
      member.segment = Segment::open(SegmentAddress::parse(get("segment", 0)));
      member.shared = SharedState(member.segment.data(), sizes);
    }
    enter(member.shared);
    open_group(member.shared);
    member.segment.close_descriptor();
    return member;
  }

 private:
  std::string get(const std::string& key, int from_rank) const {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now());
    try {
      return store_.get(key, std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception& error) {
      throw CollectiveTimeoutError("weft: rank " + std::to_string(from_rank) +
                                   " did not join group '" + options_.name + "' within " +
                                   in_seconds(options_.timeout) + " s (" + error.what() +
                                   "); see what it waits for, or raise the timeout");
    }
  }

  void enter(const SharedState& shared) const {
    RankBlock& own = shared.rank(options_.rank);
    own.pid = getpid();
    own.start_time = process_start_time(own.pid);
    own.global_rank = options_.global_ranks.empty()
                          ? options_.rank
                          : options_.global_ranks[static_cast<size_t>(options_.rank)];
    own.state.store(RankState::kJoined, std::memory_order_release);
    shared.control().num_joined.fetch_add(1, std::memory_order_acq_rel);
  }

  // Rank 0 cleans the store once nobody reads it any more, and lets all go on.
  void open_group(const SharedState& shared) const {
    Control& control = shared.control();
    if (options_.rank == 0) {
      wait_for_all(shared, [&] {
        return control.num_joined.load(std::memory_order_acquire) ==
               static_cast<uint32_t>(options_.size);
      });
      store_.remove("segment");
      control.is_open.store(true, std::memory_order_release);
    }
    wait_for_all(shared, [&] { return control.is_open.load(std::memory_order_acquire); });
  }

  void wait_for_all(const SharedState& shared, const std::function<bool()>& is_over) const {
    while (!is_over()) {
      if (Clock::now() > deadline_) {
        std::ostringstream text;
        text << "weft: joining group '" << options_.name << "' timed out after "
             << in_seconds(options_.timeout) << " s: without";
        for (int rank = 0; rank < options_.size; ++rank) {
          if (shared.rank(rank).state.load() == RankState::kAbsent) text << " rank " << rank;
        }
        throw CollectiveTimeoutError(text.str());
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  const Store& store_;
  const GroupOptions& options_;
  const Clock::time_point deadline_;
};

}  // namespace

Membership join(const Store& store, const GroupOptions& options) {
  return Joining(store, options).run();
}

Identities exchange_identities(const Store& store, const GroupOptions& options) {
  return Joining(store, options).exchange_identities();
}

void meet(const Store& store, const GroupOptions& options, const std::string& name) {
  Joining(store, options).meet(name);
}

std::string name_of_rank(const SharedState& shared, int rank) {
  const RankBlock& block = shared.rank(rank);
  std::string text = "rank " + std::to_string(rank) + " (";
  if (block.global_rank != rank) text += "global rank " + std::to_string(block.global_rank) + ", ";
  return text + "pid " + std::to_string(block.pid) + ")";
}

}  // namespace weft::collectives
