#pragma once

// The bytes that this process holds in CPU tensors, counted exactly by an allocator that wraps
// torch's, plus the shared memory of weft's groups. Not counted are storages made before
// track_memory(), storages made without torch's CPU allocator (torch::from_blob, memory-mapped
// files, other shared memory), and the internal memory of libraries.

#include <weft/memory/usage.h>
#include <weft/ops/export.h>

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <string>
#include <vector>

namespace weft::ops {

using memory::Category;

// Starts counting, until the process ends. Returns false if counting had started before.
WEFT_OPS_API bool track_memory();
WEFT_OPS_API bool is_tracking_memory();

WEFT_OPS_API memory::Totals memory_totals();
// Resets the peak and drops all phases but the current one.
WEFT_OPS_API void reset_memory_peak();
// Returns the newest phases, at most 4096, from the oldest to the current one.
WEFT_OPS_API std::vector<memory::Phase> memory_phases();

// Begins a phase, a period of the run such as a forward. Memory allocated in it gets `category`,
// except copies of tensors that weft's backend makes, which are Category::kCommunication.
// set_memory_category() and set_memory_category_since() change categories later.
WEFT_OPS_API void begin_memory_phase(const std::string& name, Category category);
// Sets the category of a tensor's memory. Returns false for memory that is not counted.
WEFT_OPS_API bool set_memory_category(const at::Tensor& tensor, Category category);
// Returns a mark of the current moment, for set_memory_category_since().
WEFT_OPS_API uint64_t memory_mark();
// Sets the category of all live memory that has category `from` and was allocated after
// memory_mark() returned `mark`.
WEFT_OPS_API void set_memory_category_since(uint64_t mark, Category from, Category to);

}  // namespace weft::ops
