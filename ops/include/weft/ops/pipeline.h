#pragma once

// Messages of pipeline_send and pipeline_recv from device to device. Without a link they stop in
// host memory on both sides.

#include <weft/ops/export.h>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>

namespace weft::ops {

// Makes a backend over two ranks, NCCL's as a rule, of which this is rank `rank`, for what goes to
// rank `towards`.
using MakeLinkBackend = std::function<c10::intrusive_ptr<c10d::Backend>(int rank, int towards)>;

// From now on messages between this rank and `peer` of `group` whose tensors are all on `device`
// travel over two backends that `make` gives, for rank 0 first; the lower one of the two in the
// group is rank 0. Others go as before. Both ranks call it before they exchange messages; it blocks
// until both have, so ranks with several peers take the pairs in one order. Small announcements go
// over the group's backend for CPU tensors.
// Errors: ValueError for a group without one, for a peer that is none, where there is a link
// already, and for backends of other ranks.
WEFT_OPS_API void link_pipeline(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                int peer,
                                c10::Device device,
                                const MakeLinkBackend& make);

// Lets go of the backends of all links in the group, after the last message has come.
WEFT_OPS_API void unlink_pipeline(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace weft::ops
