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

// Joins a group on one host; blocks until all ranks have joined. After success, the store holds no
// key that a later group with the same keys could read. After a failure, keys stay in the store, so
// the next group needs other keys; if the shared memory could not be created or opened, these keys
// report the cause to ranks that join later. REQUIRES: all ranks are on one host and have the same
// group configuration. Errors: CollectiveTimeoutError naming missing ranks; PeerLostError if a
// process ended in the meantime; GroupAbortedError if the shared memory cannot be created or
// opened, or the store cannot be read. The other ranks that wait throw the same error, unless they
// cannot read the store.
Membership join_on_host(const Store& store, const GroupOptions& options);

struct Identities {
  std::vector<std::string> hosts;    // by rank
  std::vector<GroupConfig> configs;  // by rank
  std::string nonce;                 // published by rank 0; identifies the group
};

// Blocks until all ranks have published their identities (host, group configuration and nonce), and
// returns them. The identities stay in the store: for a group on one host until join_on_host()
// removes them, for a multi-host group until each rank removes its own with forget_identity().
// `has_transport` is published in the group configuration. Errors: CollectiveTimeoutError;
// GroupAbortedError if the store cannot be read.
Identities exchange_identities(const Store& store, const GroupOptions& options, bool has_transport);
// Removes this rank's identity from the store. REQUIRES: all ranks have read it.
void forget_identity(const Store& store, const GroupOptions& options);

// A barrier through the store: blocks until all ranks have called store_barrier() with the same
// `name`. A name can be used once; its keys stay in the store. Errors: CollectiveTimeoutError
// naming the missing rank; GroupAbortedError if the store cannot be read; if `failure_key` is not
// empty, the failure that a rank sets under this key.
void store_barrier(const Store& store,
                   const GroupOptions& options,
                   const std::string& name,
                   const std::string& failure_key = {});

// format_failure() returns the text of a failure for the store; throw_failure() throws the failure
// that such a text describes.
std::string format_failure(const CollectiveError& error);
[[noreturn]] void throw_failure(const std::string& text);

// "rank 1 (pid 4711)", "rank 1 (global rank 5, pid 4711)".
std::string name_of_rank(const SharedState& shared, int rank);

}  // namespace weft::collectives
