#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

// RMS and layer norms over the last dim of x or, with a residual, of x + residual.
//
// Shapes: x, residual, grad_y and grad_sum [..., d], all of one shape; weight and bias [d]; mean
// and rstd [...], one element for each row of d elements of x. Any strides are read; results are
// contiguous.
// Dtypes: float32, float64, bfloat16, float16 for x; weight and bias have the dtype of x, or both
// float32 if x is bfloat16 or float16. bfloat16 and float16 are computed in float32, and each
// result is rounded once; mean and rstd are float32, or float64 for float64.
// Errors: c10::Error, before anything is allocated, if shapes or dtypes are not as above, or if the
// tensors are not on one device of the namespace's type.
//
// Nothing here records autograd history.
namespace weft::kernels {

enum class Norm { kRms, kLayer };

struct NormArguments {
  const at::Tensor& x;
  const std::optional<at::Tensor>& residual;
  const std::optional<at::Tensor>& weight;
  const std::optional<at::Tensor>& bias;  // only with weight
  double eps;
};

struct NormResult {
  at::Tensor y;     // norm(sum, or x without residual) * weight + bias
  at::Tensor sum;   // x + residual, rounded: the norm's input; undefined without residual
  at::Tensor mean;  // undefined for kRms
  at::Tensor rstd;  // 1 / sqrt(variance + eps); for kRms 1 / sqrt(mean square + eps)
};

struct NormSaved {
  const at::Tensor& norm_input;  // NormResult::sum, or x without residual
  const std::optional<at::Tensor>& weight;
  const std::optional<at::Tensor>& mean;  // absent for kRms
  const at::Tensor& rstd;
};

// The gradients that a backward computes.
struct NormWanted {
  bool input;
  bool params;
  bool bias;  // whether `params` includes the gradient of bias besides that of weight
};

struct NormGradients {
  at::Tensor input;  // the gradient of x and also of residual; undefined unless wanted
  // [1, d]: of weight; [2, d]: of weight, then of bias; in the dtype of weight. Undefined unless
  // wanted.
  at::Tensor params;
};

namespace cpu {

NormResult norm_forward(const NormArguments& arguments, Norm norm);

// `grad_sum`, the gradient of NormResult::sum, is added to the input's gradient.
NormGradients norm_backward(const at::Tensor& grad_y,
                            const std::optional<at::Tensor>& grad_sum,
                            const NormSaved& saved,
                            NormWanted wanted);

}  // namespace cpu

// The same functions for CUDA tensors, in the library weft_kernels_cuda. They run on the current
// stream of the input's device.
namespace cuda {

NormResult norm_forward(const NormArguments& arguments, Norm norm);

NormGradients norm_backward(const at::Tensor& grad_y,
                            const std::optional<at::Tensor>& grad_sum,
                            const NormSaved& saved,
                            NormWanted wanted);

}  // namespace cuda

}  // namespace weft::kernels
