#pragma once

#include "storage_type.h"

#include <cstdint>

// Describes a dropout by sizes and pointers only. A run is a range of elements that is contiguous
// in the shard and in the unsharded tensor. Element i of the shard has, in the unsharded tensor,
// the position
//
//   i / run_size * full_run_size + run_begin + i % run_size
//
// Its random number is word (position % 4) of philox(position / 4, seed); the element is dropped if
// that number is below `threshold`.
namespace weft::kernels::detail {

struct DropoutJob {
  StorageType type;
  int64_t num_elements;
  int64_t run_size;       // elements of a run, at least 1
  int64_t full_run_size;  // elements from one run to the next in the unsharded tensor
  int64_t run_begin;      // position of the first run
  uint64_t seed;
  uint64_t threshold;  // p * 2^32
  double scale;        // factor of the elements that are kept: 1 / (1 - p)
  const void* x = nullptr;
  void* y = nullptr;
};

}  // namespace weft::kernels::detail
