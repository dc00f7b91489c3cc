#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

// One step of Adam, AdamW or SGD with momentum, in place, with the formulae of torch's optimizers
// in float32. The states and the parameter may have low precision; float_codes.h describes the
// formats.
//
// Shapes: all tensors have the shape of the parameter, but scales have the shape that float_codes.h
// states. A parameter is viewed as a matrix [size(0), product of the other sizes]; one with fewer
// than two dims is one row. All tensors are contiguous.
// Dtypes: parameter float32 or bfloat16; low_bits (with a bfloat16 parameter) int16 or int8, which
// make a split float; grad float32 or the parameter's dtype; states float32, bfloat16, or codes
// with scales: exp_avg and momentum_buffer int8, exp_avg_sq uint8. The moments of Adam have the
// same kind of format.
//
// The parameter's update uses the new moments before they are rounded. Moments in bfloat16 and in
// codes are rounded stochastically, by seed, step and position in the unsharded tensor; so the
// result for a row does not depend on the other rows of a call, and shards whose columns begin at
// multiples of 256 get the bits of the unsharded tensor. A bfloat16 parameter without low_bits is
// rounded to nearest even.
//
// Errors: c10::Error, before anything is changed, for other shapes or dtypes, tensors on different
// devices, hyperparameters that torch's optimizers do not accept, and places outside of the
// unsharded tensor.
namespace weft::kernels {

// The place of a tensor in the unsharded tensor, and the seed of the rounding. `step` is the number
// of the step being made, from 1.
struct StepPlace {
  int64_t step;
  int64_t seed;
  int64_t row;           // of the tensor's first element in the unsharded matrix
  int64_t column;        // likewise
  int64_t full_columns;  // of the unsharded matrix
};

struct AdamStep {
  const at::Tensor& parameter;
  const at::Tensor& grad;
  const at::Tensor& exp_avg;
  const std::optional<at::Tensor>& exp_avg_scale;
  const at::Tensor& exp_avg_sq;
  const std::optional<at::Tensor>& exp_avg_sq_scale;
  const std::optional<at::Tensor>& low_bits;
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool decoupled_weight_decay;
  bool maximize;
  StepPlace place;
};

// The buffer becomes the gradient in step 1.
struct MomentumStep {
  const at::Tensor& parameter;
  const at::Tensor& grad;
  const at::Tensor& momentum_buffer;
  const std::optional<at::Tensor>& momentum_scale;
  const std::optional<at::Tensor>& low_bits;
  double lr;
  double momentum;
  double dampening;
  double weight_decay;
  bool nesterov;
  bool maximize;
  StepPlace place;
};

// The checks of the functions below; they read no data and work with tensors on meta.
void check_adam_step(const AdamStep& step);
void check_momentum_step(const MomentumStep& step);

namespace cpu {
void adam_step(const AdamStep& step);
void momentum_step(const MomentumStep& step);
}  // namespace cpu

// The same functions for CUDA tensors, in the library weft_kernels_cuda.
namespace cuda {
void adam_step(const AdamStep& step);
void momentum_step(const MomentumStep& step);
}  // namespace cuda

}  // namespace weft::kernels
