#pragma once

#include "storage_type.h"

#include <cstdint>

// Describes a dropout by sizes and pointers only. A run is a range of elements that is contiguous
// in the shard and in the unsharded tensor. Element i of the shard has the position
//
//   i / run_size * full_run_size + run_begin + i % run_size
//
// in the unsharded tensor. Its random number is word (position % 4) of philox(position / 4, seed);
// the element is dropped if that is below `threshold`.
namespace weft::kernels::detail {

struct DropoutJob {
  StorageType type;
  int64_t num_elements;
  int64_t run_size;  // at least 1 if num_elements is
  int64_t full_run_size;
  int64_t run_begin;
  uint64_t seed;
  uint64_t threshold;  // out of 2^32
  double scale;        // of elements that are kept
  const void* x = nullptr;
  void* y = nullptr;
};

}  // namespace weft::kernels::detail
