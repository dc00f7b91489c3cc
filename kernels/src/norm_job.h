#pragma once

#include "storage_type.h"

#include <cstdint>

// Describes RMS and layer norms of the rows of a matrix by sizes and pointers only, so that the
// code that runs them needs no tensor headers. All arrays are contiguous; pointers are borrowed,
// and null if unused. A scalar is a number in the compute type: double for float64, else float.
// With averages over the row:
//
//   rms:    n = v * rstd           rstd = 1 / sqrt(mean(v^2) + eps)
//   layer:  n = (v - mean) * rstd  rstd = 1 / sqrt(mean((v - mean)^2) + eps)
//   y = n * weight + bias,  v = x + residual
namespace weft::kernels::detail {

struct NormForwardJob {
  StorageType type;             // of x, residual, sum and y
  bool centered;                // layer norm
  bool params_in_compute_type;  // weight and bias are scalars; else they are of `type`
  double eps;
  int64_t num_rows;
  int64_t row_size;
  const void* x = nullptr;
  const void* residual = nullptr;
  const void* weight = nullptr;
  const void* bias = nullptr;
  void* sum = nullptr;  // v, rounded to `type`: the norm's input; null without residual
  void* y = nullptr;
  void* mean = nullptr;  // scalars, one per row; null unless centered
  void* rstd = nullptr;  // scalars, one per row
};

// With g = grad_y * weight:
//
//   rms:    grad_v = rstd * (g - n * mean(g n))            (+ grad_sum)
//   layer:  grad_v = rstd * (g - mean(g) - n * mean(g n))  (+ grad_sum)
//   grad_weight = sum over rows of grad_y * n,  grad_bias = sum over rows of grad_y
struct NormBackwardJob {
  StorageType type;             // of grad_y, grad_sum, v and grad_v
  bool centered;                // layer norm
  bool params_in_compute_type;  // weight is in scalars; else it is of `type`
  bool has_bias;                // whether to compute grad_bias, besides grad_weight
  int64_t num_rows;
  int64_t row_size;
  const void* grad_y = nullptr;
  const void* grad_sum = nullptr;
  const void* v = nullptr;
  const void* weight = nullptr;
  const void* mean = nullptr;  // scalars, one per row; null unless centered
  const void* rstd = nullptr;  // scalars, one per row
  void* grad_v = nullptr;
};

}  // namespace weft::kernels::detail
