#pragma once

// The bytes that this process holds in CPU tensors, counted exactly by an allocator that wraps
// torch's, plus the shared memory of weft's groups. Storages made before track_memory(),
// memory-mapped files, other shared memory, and allocations of other libraries are not counted.

#include <weft/memory/usage.h>
#include <weft/ops/export.h>

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <string>
#include <vector>

namespace weft::ops {

using memory::Category;

// Starts counting; it cannot be stopped. Returns false if it had been started before.
WEFT_OPS_API bool track_memory();
WEFT_OPS_API bool tracks_memory();

WEFT_OPS_API memory::Totals memory_totals();
// Resets the peak and drops all phases but the current one.
WEFT_OPS_API void reset_memory_peak();
// Returns the phases from the oldest to the current one.
WEFT_OPS_API std::vector<memory::Phase> memory_phases();

// Begins a phase. Memory allocated in it has `category` until set_memory_category changes that.
WEFT_OPS_API void begin_memory_phase(const std::string& name, Category category);
// Sets the category of a tensor's memory. Returns false for memory that is not counted.
WEFT_OPS_API bool set_memory_category(const at::Tensor& tensor, Category category);
// The same for all live memory of category `from` that was allocated after `mark`.
WEFT_OPS_API void set_memory_category_since(uint64_t mark, Category from, Category to);
WEFT_OPS_API uint64_t memory_mark();

}  // namespace weft::ops
