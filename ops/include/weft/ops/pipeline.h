#pragma once

// Messages of pipeline_send and pipeline_recv from device to device. Without a link they stop in
// host memory on both sides.

#include <weft/ops/export.h>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <optional>

namespace weft::ops {

// Makes a backend over two ranks, NCCL's as a rule, of which this is rank `rank`, for what goes to
// rank `towards`.
using MakeLinkBackend = std::function<c10::intrusive_ptr<c10d::Backend>(int rank, int towards)>;

// From now on messages between this rank and `peer` of `group` whose tensors are all on `device`
// travel over two backends that `make` gives, for rank 0 first; the lower one of the two in the
// group is rank 0. Others go as before. Both ranks call it before they exchange messages; it blocks
// until both have, so ranks with several peers take the pairs, of all groups, in one order. Small
// announcements go over the group's backend for CPU tensors.
//
// A message that was sent is in flight until the peer waits for a message that was sent later, or
// for itself: a device synchronisation on both ranks before that deadlocks.
// Errors: ValueError for a group without one, for a peer that is none, where there is a link
// already, and for backends of other ranks.
WEFT_OPS_API void link_pipeline(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                int peer,
                                c10::Device device,
                                const MakeLinkBackend& make);

// What `peer` is linked for; empty where it is not.
WEFT_OPS_API std::optional<c10::Device> pipeline_link_device(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int peer);

// Shuts the backends of all links in the group down, after the last message was waited for; the
// peers do so, too, as NCCL's wait for what is under way.
WEFT_OPS_API void unlink_pipeline(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace weft::ops
