#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>

// The checks of a group's backend for CPU tensors on messages whose two sides differ.
namespace weft::collectives {

// Whether both sides raise if their sizes differ, as with weft's backend, also under torch's
// wrapper for TORCH_DISTRIBUTED_DEBUG=DETAIL. A receive may then be posted before its size is known
// to be right. REQUIRES: a backend for CPU tensors.
bool compares_message_sizes(c10d::ProcessGroup& group);

// Fails the group on every rank, at once, with a CollectiveMismatchError whose message is `text`.
// Returns false, and does nothing, if `group` uses another backend for CPU tensors, or torch's
// wrapper.
bool fail_group(c10d::ProcessGroup& group, const std::string& text);

}  // namespace weft::collectives
