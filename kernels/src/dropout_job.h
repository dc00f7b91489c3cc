#pragma once

#include "storage_type.h"

#include <cstdint>

// A dropout, described by sizes and pointers alone. Element i of the part belongs at
//
//   i / run_size * whole_run_size + run_begin + i % run_size
//
// of the whole tensor, which is what its random number is of: word (place % 4) of
// philox(place / 4, seed). It is dropped where that is below `threshold`.
namespace weft::kernels::detail {

struct DropoutJob {
  StorageType type;
  int64_t num_elements;
  int64_t run_size;  // at least 1 when num_elements is
  int64_t whole_run_size;
  int64_t run_begin;
  uint64_t seed;
  uint64_t threshold;  // of 2^32
  double scale;        // of what is kept
  const void* x = nullptr;
  void* y = nullptr;
};

}  // namespace weft::kernels::detail
