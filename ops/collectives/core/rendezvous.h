#pragma once

// Rendezvous: how the ranks of a group find each other and map their shared memory.

#include "group_config.h"
#include "segment.h"
#include "shared_state.h"

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace weft::collectives {

// A key-value store of all ranks of the group; no other process uses these keys.
struct Store {
  std::function<void(const std::string& key, const std::string& value)> set;
  // Waits for the key; throws if it is not set within the timeout.
  std::function<std::string(const std::string& key, std::chrono::milliseconds timeout)> get;
  std::function<void(const std::string& key)> remove;
  std::function<bool(const std::string& key)> has;
  // Returns another client of the same store, for use while a thread waits for a key in this one.
  std::function<Store()> clone;
};

struct GroupOptions {
  std::string name;  // for error messages
  int rank = 0;
  int size = 1;
  std::vector<int> global_ranks;  // by rank, for error messages; empty: the same as the ranks
  // The time-out of joining, and the default time-out of an operation.
  std::chrono::milliseconds timeout{30 * 60 * 1000};
  size_t staging_limit_bytes = 16 * 1024 * 1024;  // of all ranks of the group on this host together
};

struct Membership {
  Segment segment;
  SharedState shared;
};

// Blocks until all ranks have joined. If it succeeds, the store holds no key that a later group
// with the same keys could read. If it fails, the store holds the cause, for ranks that join later,
// so the next group needs other keys. REQUIRES: ranks of one host with the same group
// configuration. Errors: CollectiveTimeoutError naming the missing ranks; PeerLostError if a
// process ended in the meantime; GroupAbortedError if the shared memory cannot be created or
// opened, or the store cannot be read. The other ranks that wait throw the same error, unless they
// cannot read the store.
Membership join(const Store& store, const GroupOptions& options);

struct Identities {
  std::vector<std::string> hosts;    // by rank
  std::vector<GroupConfig> configs;  // by rank
  std::string nonce;                 // the same on all ranks, different for each group
};

// Blocks until all ranks have published their host and group configuration, and returns these. They
// stay in the store until join() has created a group on one host, or each rank has called
// forget_identity(). Errors: CollectiveTimeoutError; GroupAbortedError if the store cannot be read.
Identities exchange_identities(const Store& store, const GroupOptions& options, bool has_transport);
// REQUIRES: all ranks have read it.
void forget_identity(const Store& store, const GroupOptions& options);

// Blocks until all ranks have called it with this name: a barrier through the store, so that no
// rank leaves before another has arrived. The name is used once and stays in the store.
// Errors: CollectiveTimeoutError naming the missing rank; GroupAbortedError if the store cannot be
// read; the failure reported under `failure_key`, if that is not empty.
void store_barrier(const Store& store,
                   const GroupOptions& options,
                   const std::string& name,
                   const std::string& failure_key = {});

// Format a failure for the store, and throw the failure that was read from it.
std::string format_failure(const CollectiveError& error);
[[noreturn]] void throw_failure(const std::string& text);

// "rank 1 (pid 4711)", "rank 1 (global rank 5, pid 4711)".
std::string name_of_rank(const SharedState& shared, int rank);

}  // namespace weft::collectives
