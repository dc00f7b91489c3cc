#pragma once

// Divides tensors into ranges: chunks for a buffer smaller than the tensor, or segments by rank.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace weft::collectives {

// The range [first, first + size), in bytes or elements.
template <typename Count>
struct Range {
  Count first;
  Count size;
};

// Returns range `index` of [0, total) divided into ranges of `range_size`; empty beyond the end.
template <typename Count>
Range<Count> range_at(int64_t index, Count total, Count range_size) {
  const Count first = std::min(static_cast<Count>(index) * range_size, total);
  return {first, std::min(range_size, total - first)};
}

template <typename Count>
int64_t num_ranges(Count total, Count range_size) {
  return static_cast<int64_t>((total + range_size - 1) / range_size);
}

// Returns the size of a slot in a buffer with one slot per rank: a multiple of the cache line, so
// that slots do not share one.
inline size_t slot_bytes(size_t buffer_bytes, int num_ranks) {
  return buffer_bytes / static_cast<size_t>(num_ranks) / 64 * 64;
}

inline void copy_bytes(std::byte* to, const std::byte* from, size_t num_bytes) {
  if (num_bytes > 0 && to != from) std::memcpy(to, from, num_bytes);
}

}  // namespace weft::collectives
