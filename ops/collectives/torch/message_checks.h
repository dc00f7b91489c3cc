#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>

// How a group's backend for CPU tensors handles messages whose two sides differ.
namespace weft::collectives {

// Whether both sides of a message raise if their sizes differ. True for weft's backend, also under
// torch's wrapper for TORCH_DISTRIBUTED_DEBUG=DETAIL. Then a receive may be posted before its size
// has been checked. REQUIRES: a backend for CPU tensors.
bool compares_message_sizes(c10d::ProcessGroup& group);

// Fails the group on every rank, without waiting for operations in flight, with a
// CollectiveMismatchError whose message is `text`. Returns false, and does nothing, if `group` uses
// another backend for CPU tensors, or torch's wrapper.
bool fail_group(c10d::ProcessGroup& group, const std::string& text);

}  // namespace weft::collectives
