#pragma once

// Host memory for received messages, reused when no tensor refers to it any more. Fresh memory
// causes a page fault per page on the first write, which takes longer than the copy.

#include "../per_group.h"
#include "message.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace weft::ops {

// The receive buffers of all groups of this process. Thread-safe.
class ReceiveBuffers {
 public:
  static ReceiveBuffers& instance() { return process_wide<ReceiveBuffers>(); }

  // Returns an uninitialized contiguous host tensor for a message of this address, or for its
  // answer. Reuses a storage of the same size from an earlier message, if no tensor refers to it.
  at::Tensor take(const PipelineAddress& address,
                  bool is_answer,
                  at::IntArrayRef sizes,
                  const at::TensorOptions& options) {
    const auto num_bytes =
        static_cast<std::size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
    // torch caches pinned memory itself.
    if (num_bytes < kMinBytes || options.pinned_memory()) {
      return at::empty(sizes, options);
    }
    Storages evicted;  // freed without the lock, like `gone`
    std::vector<std::map<Key, Storages>> gone;
    const std::lock_guard lock(mutex_);
    auto& storages =
        storages_.find_or_make(address.group, gone)[Key(address.peer, address.channel, is_answer)];
    const auto fitting = std::ranges::find_if(storages, [&](const c10::Storage& storage) {
      return is_free(storage) && storage.nbytes() == num_bytes;
    });
    if (fitting != storages.end()) {
      return tensor_on(*fitting, sizes, options);
    }
    // No free storage fits, so the layouts may have changed: evict the free storages.
    const auto free = std::ranges::partition(storages, std::not_fn(is_free));
    std::ranges::move(free, std::back_inserter(evicted));
    storages.erase(free.begin(), free.end());
    auto tensor = at::empty(sizes, options);
    // Under a mode that makes tensors without memory (a dry run), there is nothing to reuse.
    const bool has_memory = tensor.storage().device_type() == c10::DeviceType::CPU;
    if (has_memory && storages.size() < kMaxStorages) {
      storages.push_back(tensor.storage());
    }
    return tensor;
  }

  // Drops the storages of the group's messages; those that tensors refer to stay alive with them.
  void release(const ProcessGroupPtr& group) {
    std::optional<std::map<Key, Storages>> released;  // freed without the lock
    const std::lock_guard lock(mutex_);
    released = storages_.take(group);
  }

 private:
  using Storages = std::vector<c10::Storage>;
  using Key = std::tuple<int, std::int64_t, bool>;  // peer, channel, is an answer

  // The allocator itself reuses smaller blocks.
  static constexpr std::size_t kMinBytes = 64 << 10;
  // The most storages per key. A schedule needs one for each tensor of a message and micro-batch in
  // flight.
  static constexpr std::size_t kMaxStorages = 64;

  // Weak references count too, as they may become strong at any time. If nothing else refers to
  // the storage, weak_use_count() is 2: one for all strong references together, and the temporary
  // here.
  static bool is_free(const c10::Storage& storage) {
    return storage.use_count() == 1 && storage.getWeakStorageImpl().weak_use_count() == 2;
  }

  static at::Tensor tensor_on(c10::Storage storage,
                              at::IntArrayRef sizes,
                              const at::TensorOptions& options) {
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), options.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    return tensor;
  }

  std::mutex mutex_;
  PerGroup<std::map<Key, Storages>> storages_;
};

}  // namespace weft::ops
