#pragma once

// The memory that messages are received into, reused as soon as no tensor refers to it:
// fresh memory is mapped page by page while it is written, which takes longer than the copy.

#include "pipeline_message.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

namespace weft::ops {

// The receive buffers of all groups of this process. Thread-safe.
class ReceiveBuffers {
 public:
  static ReceiveBuffers& instance();

  // An uninitialised contiguous tensor in host memory, for a message of this address or the answer
  // to one: in the memory of an earlier one if it fits and only this holds it.
  at::Tensor take(const PipelineAddress& address,
                  bool is_answer,
                  at::IntArrayRef sizes,
                  const at::TensorOptions& options);

  // Lets go of all memory of the group's messages; what others hold stays theirs.
  void release(const ProcessGroupPtr& group);

 private:
  using GroupRef = c10::weak_intrusive_ptr<c10d::ProcessGroup>;
  struct Pool {
    GroupRef group;  // keeps the address from being taken by another group
    std::vector<c10::Storage> storages;
  };

  std::mutex mutex_;
  std::map<std::tuple<c10d::ProcessGroup*, int, std::int64_t, bool>, Pool> pools_;
};

}  // namespace weft::ops
