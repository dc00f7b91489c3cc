#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>

namespace weft::collectives {

// Fails the group on every rank, at once, with a CollectiveMismatchError of that text. False, and
// nothing was done, where the CPU tensors of `group` travel over another backend.
bool fail_group(c10d::ProcessGroup& group, const std::string& text);

}  // namespace weft::collectives
