#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>

namespace weft::collectives {

// Writes a rank's summand into its argument, a contiguous uninitialized tensor.
using WriteInput = std::function<void(at::Tensor&)>;

// Starts an all-reduce over `group`: `result` receives the sum of the tensors that `write_input`
// writes, which have the shape and dtype of `result`. For a large tensor, `write_input` gets shared
// memory of the group if that is available, which saves a copy; otherwise `result` itself. Returns
// null, and writes nothing, if `group` uses another backend for CPU tensors. REQUIRES: `result` is
// a contiguous CPU tensor; the caller waits for the work soon.
c10::intrusive_ptr<c10d::Work> all_reduce_from_writer(c10d::ProcessGroup& group,
                                                      at::Tensor& result,
                                                      const WriteInput& write_input);

}  // namespace weft::collectives
