#pragma once

// The c10d backend "weft" for C++ programs: collectives of CPU tensors between processes, through
// shared memory within a host and over another backend between hosts. Python reaches it as
// init_process_group("cpu:weft").
//
// What its works and calls raise is in <weft/collectives/error.h>.

#include <weft/collectives/error.h>
#include <weft/ops/export.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace weft::ops {

struct BackendOptions final : c10d::Backend::Options {
  // The inherited timeout: of joining the group, and of each operation that names none.
  BackendOptions() : Options("weft") {}
#ifdef C10D_BACKEND_HAS_RECONFIGURE  // c10d clones options since then
  c10::intrusive_ptr<Options> clone() const override {
    return c10::make_intrusive<BackendOptions>(*this);
  }
#endif

  // Makes a backend over the same ranks whose send and recv carry bytes between hosts, gloo say;
  // called on every rank, and only where the ranks run on several hosts. `store` is its own.
  std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank,
                                                  int size,
                                                  std::chrono::milliseconds timeout)>
      make_transport;

  // The limit of the shared memory that all ranks of the group on this host take together. The same
  // on all ranks of a host.
  std::size_t staging_limit_bytes = std::size_t{16} << 20;
};

// Makes a process group for CPU tensors over such a backend, which the operators find under `name`
// as long as the caller holds it. One store serves groups of different names. Blocks until all
// `size` ranks have called it; `options->group_name` becomes `name`.
// Errors: those of make_backend; c10::ValueError, before anybody waits, for an empty name and for
// one that a group has (c10d::unregister_process_group gives it back).
WEFT_OPS_API c10::intrusive_ptr<c10d::ProcessGroup> make_group(
    const std::string& name,
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<BackendOptions> options = c10::make_intrusive<BackendOptions>());

// Joins the group: blocks until all `size` ranks have called it with a view of one `store` that no
// other group uses. A program adds it to a c10d::ProcessGroup with setBackend(at::kCPU, CUSTOM,
// ...), which make_group does. Errors: CollectiveTimeoutError naming the ranks that did not come;
// CollectiveMismatchError, the same on all ranks, for ranks on several hosts without a
// make_transport on each, and for ranks of one host with different staging_limit_bytes;
// GroupAbortedError where memory cannot be made or opened. What was told of a refused group stays
// in the store, for ranks that come late: another group needs another store, or another prefix.
WEFT_OPS_API c10::intrusive_ptr<c10d::Backend> make_backend(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<BackendOptions> options);

// Shared memory in which this process writes, in all its groups: the pages that are there now.
WEFT_OPS_API std::size_t shared_memory_bytes();

// Tells the peers of all groups that this process ends: for the end of a program that keeps its
// groups until then.
WEFT_OPS_API void leave_all_groups();

}  // namespace weft::ops
