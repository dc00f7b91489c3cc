// Memory of devices, pinned memory, and copies. All memory is the host's.
//
// Memory of a device is filled with NaN when it is allocated. A copy from pageable
// memory reads it before the call returns, and a copy to pageable memory has ended when the call
// returns; all other copies are work of their stream, as in CUDA.
//
// Where kernels are skipped, copies to a device and memsets are skipped, too. Memory of a device is
// then zero, so that values are the same in every run, and only reserved, so that a model may be
// larger than the host's memory.

#include "runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <sys/mman.h>
#include <vector>

namespace weft::cuda_runtime {
namespace {

constexpr int kPoison = 0xFF;  // NaN in every floating type
constexpr std::size_t kPage = 4096;

struct Block {
  std::size_t num_bytes = 0;
  int device = -1;  // -1: pinned
};

struct Memory {
  std::mutex mutex;
  std::map<const char*, Block> blocks;  // by first byte
  std::map<int, std::size_t> used;      // by device
};

Memory& memory() {
  static Memory& instance = *new Memory;
  return instance;
}

// Returns the block that holds the byte at `pointer`, or null. Call it with the mutex held.
const Block* find(const void* pointer) {
  const auto* byte = static_cast<const char*>(pointer);
  auto found = memory().blocks.upper_bound(byte);
  if (found == memory().blocks.begin()) return nullptr;
  --found;
  return byte < found->first + std::max<std::size_t>(found->second.num_bytes, 1) ? &found->second
                                                                                 : nullptr;
}

bool is_pageable(const void* pointer) {
  const std::lock_guard lock(memory().mutex);
  return find(pointer) == nullptr;
}

bool is_on_device(const void* pointer) {
  const std::lock_guard lock(memory().mutex);
  const Block* block = find(pointer);
  return block != nullptr && block->device >= 0;
}

cudaError_t allocate_pinned(void** result, std::size_t num_bytes) {
  if (const auto error = status(); error != cudaSuccess) return error;
  void* pointer = std::aligned_alloc(kPage, (num_bytes + kPage) / kPage * kPage);
  if (pointer == nullptr) return fail(cudaErrorMemoryAllocation, "the host is out of memory");
  const std::lock_guard lock(memory().mutex);
  memory().blocks[static_cast<const char*>(pointer)] = {.num_bytes = num_bytes};
  *result = pointer;
  return cudaSuccess;
}

cudaError_t copy(
    void* to, const void* from, std::size_t num_bytes, cudaStream_t stream, bool waits) {
  if (const auto error = status(); error != cudaSuccess) return error;
  if (num_bytes == 0) return cudaSuccess;
  const bool is_from_pageable = is_pageable(from);
  if (is_captured(stream) && (is_from_pageable || is_pageable(to))) {
    return fail(cudaErrorStreamCaptureUnsupported, "a captured copy of pageable memory");
  }
  if (settings().skips_kernels && is_on_device(to)) return cudaSuccess;
  if (is_from_pageable) {
    const auto* bytes = static_cast<const char*>(from);
    submit(stream, [to, copied = std::vector(bytes, bytes + num_bytes)] {
      std::memcpy(to, copied.data(), copied.size());
    });
  } else {
    submit(stream, [=] { std::memmove(to, from, num_bytes); });
  }
  if (waits || is_pageable(to)) wait_for_stream(stream);
  return status();
}

cudaError_t set(void* to, int value, std::size_t num_bytes, cudaStream_t stream) {
  if (settings().skips_kernels && is_on_device(to)) return cudaSuccess;
  submit(stream, [=] { std::memset(to, value, num_bytes); });
  return status();
}

}  // namespace
}  // namespace weft::cuda_runtime

using namespace weft::cuda_runtime;  // NOLINT: the functions below are C's

WEFT_CUDA_API cudaError_t cudaMalloc(void** result, std::size_t num_bytes) {
  if (const auto error = status(); error != cudaSuccess) return error;
  count("allocations");
  const std::lock_guard lock(memory().mutex);
  std::size_t& used = memory().used[current_device()];
  const std::size_t size = std::max<std::size_t>(num_bytes, 1);
  if (used + num_bytes > settings().num_bytes) {
    return fail(cudaErrorMemoryAllocation, "out of memory");
  }
  void* pointer = mmap(
      nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pointer == MAP_FAILED) return fail(cudaErrorMemoryAllocation, "the host is out of memory");
  if (!settings().skips_kernels) std::memset(pointer, kPoison, num_bytes);
  memory().blocks[static_cast<const char*>(pointer)] = {num_bytes, current_device()};
  used += num_bytes;
  *result = pointer;
  return cudaSuccess;
}

WEFT_CUDA_API cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return status();
  int device = -1;
  {
    const std::lock_guard lock(memory().mutex);
    const auto found = memory().blocks.find(static_cast<const char*>(pointer));
    if (found == memory().blocks.end() || found->second.device < 0) {
      return fail(cudaErrorInvalidValue, "cudaFree of memory that cudaMalloc did not return");
    }
    device = found->second.device;
  }
  wait_for_device(device);
  const std::lock_guard lock(memory().mutex);
  const auto found = memory().blocks.find(static_cast<const char*>(pointer));
  memory().used[device] -= found->second.num_bytes;
  munmap(pointer, std::max<std::size_t>(found->second.num_bytes, 1));
  memory().blocks.erase(found);
  return status();
}

WEFT_CUDA_API cudaError_t cudaMemGetInfo(std::size_t* num_free, std::size_t* total) {
  const std::lock_guard lock(memory().mutex);
  *total = settings().num_bytes;
  *num_free = *total - memory().used[current_device()];
  return status();
}

// ---- pinned memory -----------------------------------------------------------------------------

WEFT_CUDA_API cudaError_t cudaHostAlloc(void** result, std::size_t num_bytes, unsigned) {
  return allocate_pinned(result, num_bytes);
}
WEFT_CUDA_API cudaError_t cudaMallocHost(void** result, std::size_t num_bytes) {
  return allocate_pinned(result, num_bytes);
}

WEFT_CUDA_API cudaError_t cudaFreeHost(void* pointer) {
  for (int device = 0; device < settings().num_devices; ++device) wait_for_device(device);
  const std::lock_guard lock(memory().mutex);
  memory().blocks.erase(static_cast<const char*>(pointer));
  std::free(pointer);
  return status();
}

WEFT_CUDA_API cudaError_t cudaHostRegister(void* pointer, std::size_t num_bytes, unsigned) {
  const std::lock_guard lock(memory().mutex);
  memory().blocks[static_cast<const char*>(pointer)] = {.num_bytes = num_bytes};
  return status();
}

WEFT_CUDA_API cudaError_t cudaHostUnregister(void* pointer) {
  const std::lock_guard lock(memory().mutex);
  memory().blocks.erase(static_cast<const char*>(pointer));
  return status();
}

WEFT_CUDA_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* result,
                                                   const void* pointer) {
  std::memset(result, 0, sizeof *result);
  const std::lock_guard lock(memory().mutex);
  const Block* block = find(pointer);
  if (block == nullptr) {
    result->type = cudaMemoryTypeUnregistered;
  } else if (block->device < 0) {
    result->type = cudaMemoryTypeHost;
    result->hostPointer = const_cast<void*>(pointer);
  } else {
    result->type = cudaMemoryTypeDevice;
    result->device = block->device;
    result->devicePointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

// ---- copies ------------------------------------------------------------------------------------

WEFT_CUDA_API cudaError_t cudaMemcpy(void* to,
                                     const void* from,
                                     std::size_t num_bytes,
                                     cudaMemcpyKind) {
  return copy(to, from, num_bytes, nullptr, /*waits=*/true);
}
WEFT_CUDA_API cudaError_t cudaMemcpyAsync(
    void* to, const void* from, std::size_t num_bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, num_bytes, stream, /*waits=*/false);
}
WEFT_CUDA_API cudaError_t cudaMemcpyPeerAsync(
    void* to, int, const void* from, int, std::size_t num_bytes, cudaStream_t stream) {
  return copy(to, from, num_bytes, stream, /*waits=*/false);
}

WEFT_CUDA_API cudaError_t cudaMemset(void* to, int value, std::size_t num_bytes) {
  return set(to, value, num_bytes, nullptr);
}
WEFT_CUDA_API cudaError_t cudaMemsetAsync(void* to,
                                          int value,
                                          std::size_t num_bytes,
                                          cudaStream_t stream) {
  return set(to, value, num_bytes, stream);
}
