#pragma once

#include "storage_type.h"

#include <c10/macros/Macros.h>

#include <cstdint>

// Describes the statistics and the gradient of rows of logits by sizes and pointers only, so that
// the code that runs them needs no tensor headers. Pointers are borrowed. Arrays are contiguous;
// the rows of the logits may lie apart. `scalar` is the compute type: double for float64, else
// float.
namespace weft::kernels::detail {

// The target of each row, and its column in this shard of the classes.
struct CrossEntropyTargets {
  const int64_t* target = nullptr;
  int64_t vocab_start;
  int64_t ignore_index;
  int64_t row_size;

  C10_HOST_DEVICE C10_ALWAYS_INLINE bool is_ignored(int64_t row) const {
    return target[row] == ignore_index;
  }

  // Returns -1 if the target is ignored or belongs to another shard.
  C10_HOST_DEVICE C10_ALWAYS_INLINE int64_t column(int64_t row) const {
    const int64_t own = target[row];
    const bool is_own = own != ignore_index && own >= vocab_start && own - vocab_start < row_size;
    return is_own ? own - vocab_start : -1;
  }
};

// Four scalars per row: the largest logit m, the sum of exp(logit - m), the target's logit, the
// sum of the logits.
struct CrossEntropyStatisticsJob {
  StorageType type;  // of the logits
  bool wants_sum;
  int64_t num_rows;
  int64_t row_size;
  int64_t row_stride;  // of the logits, in elements
  CrossEntropyTargets targets;
  const void* logits = nullptr;
  void* statistics = nullptr;
};

// With p = exp(logit - largest - log_sum):
//
//   gradient = grad * (p - smoothing / num_classes - (1 - smoothing) [at the target])
//
// and 0 where the target is ignored.
struct CrossEntropyGradientJob {
  StorageType type;  // of the logits and the gradient
  int64_t num_rows;
  int64_t row_size;
  int64_t row_stride;          // of the logits, in elements
  double smoothing;            // label smoothing
  double smoothing_per_class;  // smoothing / num_classes
  CrossEntropyTargets targets;
  const void* logits = nullptr;
  const void* grad = nullptr;     // scalars, one per row
  const void* largest = nullptr;  // scalars, one per row
  const void* log_sum = nullptr;  // scalars, one per row
  void* gradient = nullptr;       // may be `logits`
};

}  // namespace weft::kernels::detail
