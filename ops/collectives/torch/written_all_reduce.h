#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>

namespace weft::collectives {

// Puts a rank's part of a sum into the tensor it is given, contiguous and not initialised.
using Write = std::function<void(at::Tensor&)>;

// Starts the sum over `group` of what `write` puts into a tensor like `result`, which gets the sum:
// `write` is given memory of the group where it has some free, so that the part need not be copied
// there, and `result` itself otherwise. Null, and nothing was written, where the CPU tensors of
// `group` travel over another backend.
// REQUIRES: a contiguous CPU tensor; the caller waits for the work soon.
c10::intrusive_ptr<c10d::Work> all_reduce_written(c10d::ProcessGroup& group,
                                                  at::Tensor& result,
                                                  const Write& write);

}  // namespace weft::collectives
