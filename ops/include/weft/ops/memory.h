#pragma once

// The bytes that this process holds in CPU tensors, counted to the byte by an allocator around
// torch's. What is not counted: storages made before track_memory(), mapped files, shared memory,
// and what other libraries allocate for themselves.

#include <weft/memory/usage.h>
#include <weft/ops/export.h>

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <string>
#include <vector>

namespace weft::ops {

using memory::Category;

// Counts from now on; for good. Returns false where it did so before.
WEFT_OPS_API bool track_memory();
WEFT_OPS_API bool tracks_memory();

WEFT_OPS_API memory::Totals memory_totals();
// Forgets the peak, and all phases but the present one.
WEFT_OPS_API void reset_memory_peak();
// The oldest first, the present one last.
WEFT_OPS_API std::vector<memory::Phase> memory_phases();

// Begins a phase: memory allocated in it is of `category` until it is told better.
WEFT_OPS_API void begin_memory_phase(const std::string& name, Category category);
// Says what the memory of a tensor is for. False for memory that is not counted.
WEFT_OPS_API bool set_memory_category(const at::Tensor& tensor, Category category);
// The same for all that came after `mark`, still lives, and is of category `from`.
WEFT_OPS_API void set_memory_category_since(uint64_t mark, Category from, Category to);
WEFT_OPS_API uint64_t memory_mark();

}  // namespace weft::ops
