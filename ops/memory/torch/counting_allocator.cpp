#include "counting_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>
#include <new>

namespace weft::memory {

namespace {

// The wrapped allocator; null before install_counting_allocator(). Global, because a deleter is a
// function without state.
std::atomic<c10::Allocator*> wrapped_allocator{nullptr};

BlockHeader* header_before(void* data) { return static_cast<BlockHeader*>(data) - 1; }

void free_block(void* data) {
  if (data == nullptr) return;
  BlockHeader* const header = header_before(data);
  ledger().remove(*header);
  wrapped_allocator.load()->raw_deallocate(header);
}

// oneDNN and others pass get() to raw_deleter(), so data and context of a DataPtr must be the same
// pointer. Hence a block's header is in front of the data rather than in a context.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::Device cpu(c10::kCPU);
    if (num_bytes == 0) return {nullptr, nullptr, &free_block, cpu};
    auto* const header =
        new (wrapped_allocator.load()->raw_allocate(sizeof(BlockHeader) + num_bytes)) BlockHeader;
    header->num_bytes = num_bytes;
    ledger().add(*header);
    void* const data = header + 1;
    return {data, data, &free_block, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }
};

}  // namespace

bool install_counting_allocator() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (is_counting()) return false;
  c10::Allocator* const base = c10::GetCPUAllocator();
  TORCH_CHECK(base->raw_deleter() != nullptr,
              "weft: got a CPU allocator without a raw_deleter, whose memory cannot be counted; "
              "start counting before that allocator is installed");
  wrapped_allocator = base;
  // Never destroyed: storages refer to it, and blocks may be freed at process exit.
  c10::SetCPUAllocator(new CountingAllocator, UINT8_MAX);
  return true;
}

bool is_counting() { return wrapped_allocator.load() != nullptr; }

BlockHeader* header_of(const c10::DataPtr& data) {
  const bool is_ours = data.get_deleter() == &free_block && data.get() != nullptr;
  return is_ours ? header_before(data.get()) : nullptr;
}

}  // namespace weft::memory
