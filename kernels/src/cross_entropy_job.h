#pragma once

#include "storage_type.h"

#include <c10/macros/Macros.h>

#include <cstdint>

// Describes the statistics and the gradient of rows of logits, one row per token, by sizes and
// pointers only, so that the code that runs the jobs needs no tensor headers. Pointers are
// borrowed. Arrays are contiguous, but there may be gaps between the rows of the logits. A scalar
// is a number in the compute type: double for float64, else float.
namespace weft::kernels::detail {

// The target of each row, and its column in this shard of the classes.
struct CrossEntropyTargets {
  const int64_t* target = nullptr;  // one class of the full vocabulary per row
  int64_t vocab_start;
  int64_t ignore_index;
  int64_t row_size;  // the number of classes of this shard

  C10_HOST_DEVICE C10_ALWAYS_INLINE bool is_ignored(int64_t row) const {
    return target[row] == ignore_index;
  }

  // Returns -1 if the target is ignored or belongs to another shard.
  C10_HOST_DEVICE C10_ALWAYS_INLINE int64_t column(int64_t row) const {
    const int64_t id = target[row];
    const bool is_in_shard = id != ignore_index && id >= vocab_start && id - vocab_start < row_size;
    return is_in_shard ? id - vocab_start : -1;
  }
};

// The statistics are four scalars per row: the largest logit, the sum of exp(logit - largest), the
// target's logit, and the sum of the logits.
struct CrossEntropyStatisticsJob {
  StorageType type;  // of the logits
  bool wants_sum;    // of the logits; else that statistic is 0
  int64_t num_rows;
  int64_t row_size;
  int64_t row_stride;  // of the logits, in elements
  CrossEntropyTargets targets;
  const void* logits = nullptr;
  void* statistics = nullptr;
};

// With p = exp(logit - largest - log_sum), where `largest` and log_sum, the logarithm of the sum of
// exp(logit - largest), are over the classes of all shards:
//
//   grad_logit = grad_loss * (p - smoothing / num_classes - (1 - smoothing) [at the target])
//
// and 0 in rows whose target is ignored. num_classes counts the classes of all shards.
struct CrossEntropyGradientJob {
  StorageType type;  // of the logits and grad_logits
  int64_t num_rows;
  int64_t row_size;
  int64_t row_stride;          // of the logits, in elements
  double smoothing;            // label smoothing
  double smoothing_per_class;  // smoothing / num_classes
  CrossEntropyTargets targets;
  const void* logits = nullptr;
  const void* grad_losses = nullptr;  // scalars, one per row
  const void* largest = nullptr;      // scalars, one per row
  const void* log_sum = nullptr;      // scalars, one per row
  void* grad_logits = nullptr;        // may be `logits`
};

}  // namespace weft::kernels::detail
