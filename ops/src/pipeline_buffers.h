#pragma once

// Host memory for received messages, reused when no tensor refers to it any more. Fresh memory
// causes a page fault per page on the first write, which takes longer than the copy.

#include "per_group.h"
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
  static ReceiveBuffers& instance() { return process_wide<ReceiveBuffers>(); }

  // Returns an uninitialised contiguous host tensor for a message of this address, or for its
  // answer. Reuses the storage of an earlier one of the same size that is free.
  at::Tensor take(const PipelineAddress& address,
                  bool is_answer,
                  at::IntArrayRef sizes,
                  const at::TensorOptions& options);

  // Drops the storages of the group's messages; those that tensors refer to stay alive with them.
  void release(const ProcessGroupPtr& group);

 private:
  using Storages = std::vector<c10::Storage>;
  using Key = std::tuple<int, std::int64_t, bool>;  // peer, channel, is an answer

  std::mutex mutex_;
  PerGroup<std::map<Key, Storages>> storages_;
};

}  // namespace weft::ops
