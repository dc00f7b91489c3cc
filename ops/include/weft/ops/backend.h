#pragma once

// The c10d backend "weft" for C++ programs: collectives of CPU tensors between processes, through
// shared memory within a host and over another backend between hosts. Python uses it through
// init_process_group("cpu:weft").
//
// The backend's calls and Work objects raise the errors of <weft/collectives/error.h>.

#include <weft/collectives/error.h>
#include <weft/ops/export.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace weft::ops {

// Makes calls between hosts as slow as on a network with these rates, by waiting: a tool for tests
// and benchmarks on one host. Calls that run at the same time do not slow each other.
struct SlowNetwork {
  std::int64_t ranks_per_host = 1;  // as many consecutive global ranks count as one host
  double seconds_per_message = 0;
  double bytes_per_second = 1;  // that a rank sends
};

struct BackendOptions final : c10d::Backend::Options {
  // The inherited timeout bounds joining the group and every operation without a timeout of its
  // own.
  BackendOptions() : Options("weft") {}
#ifdef C10D_BACKEND_HAS_RECONFIGURE  // releases with this macro clone the options
  c10::intrusive_ptr<Options> clone() const override {
    return c10::make_intrusive<BackendOptions>(*this);
  }
#endif

  // Returns a backend over the same ranks, such as gloo, whose send and recv carry bytes between
  // hosts. Called on every rank of a multi-host group, and not for a group on one host. `store` is
  // reserved for this backend.
  std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank,
                                                  int size,
                                                  std::chrono::milliseconds timeout)>
      make_transport;

  // Upper limit for the size of the staging buffers and message rings of all ranks of the group on
  // this host together, unless their minimum sizes need more. Must be equal on all ranks of a host.
  std::size_t staging_limit_bytes = std::size_t{16} << 20;

  // A work is complete only when the call would be on this network: see network_time() and
  // PretendedLink in slow_network.h.
  std::optional<SlowNetwork> slow_network;
};

// Makes a process group for CPU tensors over the backend "weft" and registers it: operators find it
// under `name` as long as the caller keeps the returned pointer. Groups of different names may
// share a store. Blocks until all `size` ranks have called make_group; sets `options->group_name`
// to `name`.
// Errors: those of make_backend; c10::ValueError, before this rank blocks, for an empty name and
// for a name that is in use in this process (c10d::unregister_process_group frees it).
WEFT_OPS_API c10::intrusive_ptr<c10d::ProcessGroup> make_group(
    const std::string& name,
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<BackendOptions> options = c10::make_intrusive<BackendOptions>());

// Joins the group and returns the backend: blocks until all `size` ranks have called make_backend.
// All of them pass a client of the same `store`, which no other group uses. To use the backend, add
// it to a c10d::ProcessGroup with setBackend(at::kCPU, CUSTOM, ...), as make_group does. Errors:
// c10::ValueError for a rank that is not in [0, size); CollectiveTimeoutError naming the ranks that
// did not join; CollectiveMismatchError, the same on all ranks, for different versions of weft, for
// a multi-host group where a rank has no make_transport, and for ranks of one host with different
// staging_limit_bytes; GroupAbortedError if shared memory cannot be created or opened, the store
// cannot be read, or a transport cannot be created. The keys of a group that failed stay in the
// store, so that late ranks fail too: the next group needs another store or another prefix.
WEFT_OPS_API c10::intrusive_ptr<c10d::Backend> make_backend(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<BackendOptions> options);

// Returns the resident bytes of the shared memory that this process writes to, over all its groups.
WEFT_OPS_API std::size_t shared_memory_bytes();

// A call of a collective, or a message, in a group of this process.
struct LoggedCall {
  std::string group_name;
  std::vector<int> global_ranks;  // by rank of the group
  std::uint64_t sequence;         // of the group's collectives, from 1; 0: a message
  std::string call;               // "all_reduce(sum, float32 [4])", "send(to rank 1, tag 0)"
  std::uint64_t num_bytes;        // of this rank's input tensors, or of the message
  std::string state;              // "started", "done" or "failed"
  double begin;                   // in seconds since 1970
  std::optional<double> end;      // the same; unless "started"
};

// Returns the newest calls of this process in all its groups, at most 512, the oldest first.
WEFT_OPS_API std::vector<LoggedCall> flight_log();

// Returns the texts of the failures of the groups that this process has not left, the oldest group
// first. A group fails on all ranks, also on those that make no call.
WEFT_OPS_API std::vector<std::string> failures_of_groups();

// Returns the seconds that the calling thread has waited for collectives and messages of all
// groups, which include the time in which it moved and reduced data. Waits through futures do not
// count.
WEFT_OPS_API double seconds_waited();

// Announces to the peers of all groups that this process exits. A program that keeps its groups
// until it exits must call this function before it exits.
WEFT_OPS_API void leave_all_groups();

}  // namespace weft::ops
