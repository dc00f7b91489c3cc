#pragma once

#include "low_precision.h"

#include <cstdint>

// Describes one optimizer step of one tensor by sizes and pointers only. The tensor is a matrix of
// contiguous rows. Each row consists of blocks of kCodeBlock elements, the last of which may be
// shorter. The position of element [i, j] in the unsharded tensor is
// (row + i) * full_columns + column + j, modulo 2^64.
namespace weft::kernels::detail {

// kSplit16 and kSplit8: bfloat16, and 16 or 8 further bits in another array.
enum class WeightFormat { kFloat32, kBFloat16, kSplit16, kSplit8 };
// kCodes: signed codes of the momentum or first moment, unsigned ones of the second moment, each
// array with the scales of its blocks.
enum class StateFormat { kFloat32, kBFloat16, kCodes };

// Flags are 0 or 1: loops with a selection by a bool do not vectorise with every format.

struct AdamConstants {
  float grad_sign;        // -1 to maximize, else 1
  float grad_decay;       // weight decay that is added to the gradient
  float parameter_decay;  // factor of the parameter: 1 - lr * weight_decay if decoupled
  float exp_avg_weight;   // 1 - beta1, or -beta1 if starts_at_grad
  float starts_at_grad;   // flag: 1 - beta1 >= 0.5
  float beta2;
  float exp_avg_sq_weight;  // 1 - beta2
  float root_factor;        // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)
};

struct MomentumConstants {
  float grad_sign;
  float grad_decay;
  float momentum;
  float grad_weight;  // 1 - dampening
  float lr;
  float nesterov;  // flag
  float is_first;  // flag: the buffer becomes the gradient
};

struct StateArray {
  void* values = nullptr;
  float* scales = nullptr;  // [rows, blocks of a row], for kCodes
};

struct OptimizerStepJob {
  WeightFormat weight_format;
  bool has_bfloat16_grad;
  StateFormat state_format;
  int64_t num_rows;
  int64_t row_size;  // at least 1
  int64_t row;
  int64_t column;
  int64_t full_columns;
  uint64_t seed;
  uint64_t step;
  void* parameter = nullptr;
  void* low_bits = nullptr;
  const void* grad = nullptr;
  StateArray first;   // exp_avg, or the momentum
  StateArray second;  // exp_avg_sq; null for a momentum step

  int64_t blocks_per_row() const { return (row_size + kCodeBlock - 1) / kCodeBlock; }
};

struct AdamStepJob : OptimizerStepJob {
  AdamConstants constants;
};

struct MomentumStepJob : OptimizerStepJob {
  MomentumConstants constants;
};

}  // namespace weft::kernels::detail
