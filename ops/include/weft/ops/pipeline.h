#pragma once

// Links: direct device-to-device messages between two ranks for pipeline_send and pipeline_recv.
// Without a link, both sides copy messages through host memory.

#include <weft/ops/export.h>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <optional>

namespace weft::ops {

// Returns a backend over two ranks, usually NCCL, in which this process is rank `rank` (0 or 1).
// The backend carries the messages to rank `towards` (0 or 1).
using MakeLinkBackend = std::function<c10::intrusive_ptr<c10d::Backend>(int rank, int towards)>;

// Links this rank and `peer` of `group`: messages between them whose tensors are all on `device`
// are sent over two backends, one per direction, that `make` returns; all other messages are sent
// through host memory, as without a link. `make` is called for `towards` 0 first; the lower of the
// two group ranks is rank 0. Both ranks call link_pipeline before they exchange messages. The call
// blocks until both ranks have called it, so all ranks must link the pairs of all groups in the
// same order. The headers of the messages are sent over the group's backend for CPU tensors.
//
// A sent message is in flight until the peer waits for it or for a later one: a device
// synchronization on both ranks before that deadlocks.
// Errors: ValueError for a group without a CPU backend, for an invalid peer, for a pair that is
// linked already, and for a backend whose size is not 2 or whose rank is not the one passed to
// `make`; TypeError if `make` returns no backend.
WEFT_OPS_API void link_pipeline(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                int peer,
                                c10::Device device,
                                const MakeLinkBackend& make);

// Returns the device that `peer` is linked for; empty if it is not linked.
WEFT_OPS_API std::optional<c10::Device> pipeline_link_device(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int peer);

// Shuts down the backends of all links in the group. Call it on all ranks, after the last message
// was waited for: NCCL's shutdown waits for communication in flight.
WEFT_OPS_API void unlink_pipeline(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace weft::ops
