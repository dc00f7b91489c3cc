#pragma once

// How the ranks of a group find each other's memory.

#include "segment.h"
#include "shared_state.h"
#include "terms.h"

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace weft::collectives {

// A key-value store that all ranks of the group see, and no other process under these keys.
struct Store {
  std::function<void(const std::string& key, const std::string& value)> set;
  // Waits for the key; throws when it does not come within the timeout.
  std::function<std::string(const std::string& key, std::chrono::milliseconds timeout)> get;
  std::function<void(const std::string& key)> remove;
  std::function<bool(const std::string& key)> has;
  // The same, for use while another thread waits for a key here.
  std::function<Store()> clone;
};

struct GroupOptions {
  std::string name;  // for texts
  int rank = 0;
  int size = 1;
  std::vector<int> global_ranks;  // by rank, for texts; empty: the same
  // The limit for joining, and the default limit for each operation.
  std::chrono::milliseconds timeout{30 * 60 * 1000};
  size_t staging_limit_bytes = 16 * 1024 * 1024;  // of the group on this host, together
};

struct Membership {
  Segment segment;
  SharedState shared;
};

// Blocks until all ranks are there. A group that was made leaves nothing in the store that a later
// group with the same keys could read; a group that failed leaves its reasons, for ranks that come
// late, so the next group needs other keys. REQUIRES: ranks of one host, which have
// the same terms. Errors: CollectiveTimeoutError naming the ranks that did not come; PeerLostError
// where a process ended meanwhile; GroupAbortedError where memory cannot be made, or another's not
// be opened: the ranks that have come as far throw the same.
Membership join(const Store& store, const GroupOptions& options);

struct Identities {
  std::vector<std::string> hosts;  // by rank
  std::vector<Terms> terms;        // by rank
  std::string nonce;               // the same on all ranks, and no other group's
};

// Blocks until all ranks have told who their host is and what they bring, which stays in the store
// until join() has made them a group on one host, or each rank has called forget_identity().
// Errors: CollectiveTimeoutError.
Identities exchange_identities(const Store& store, const GroupOptions& options, bool has_transport);
// REQUIRES: all ranks have read it.
void forget_identity(const Store& store, const GroupOptions& options);

// Blocks until all ranks have called it with this name, which is no other meeting's: a rank that
// went on could leave before another has come as far. It stays in the store.
// Errors: CollectiveTimeoutError naming the rank that did not come; what is told under
// `failure_key`, if that is not empty.
void meet(const Store& store,
          const GroupOptions& options,
          const std::string& name,
          const std::string& failure_key = {});

// A failure as ranks tell it through the store, and back: throws what was told.
std::string format_failure(const CollectiveError& error);
[[noreturn]] void throw_failure(const std::string& told);

// "rank 1 (pid 4711)", "rank 1 (global rank 5, pid 4711)".
std::string name_of_rank(const SharedState& shared, int rank);

}  // namespace weft::collectives
