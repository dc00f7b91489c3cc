#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>

namespace weft::collectives {

// Fails the group on every rank, at once, with a CollectiveMismatchError whose message is `text`.
// Returns false, and does nothing, if `group` uses another backend for CPU tensors.
bool fail_group(c10d::ProcessGroup& group, const std::string& text);

}  // namespace weft::collectives
