#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

// RMS and layer norms over the last dim, optionally of the sum with a residual.
//
// Shapes: x, residual and gradients [..., d], all of one shape; weight and bias [d]; mean and rstd
// [...], whose elements are the rows. Any strides are read; results are contiguous.
// Dtypes: float32, float64, bfloat16, float16 for x; weight and bias have the dtype of x, or both
// float32 if x is a half type. Half types are computed in float32 and rounded once; mean and rstd
// are float32, or float64 for float64.
// Errors: c10::Error when shapes, dtypes or devices disagree, before anything is allocated.
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
  at::Tensor y;     // norm(x + residual) * weight + bias
  at::Tensor sum;   // x + residual, rounded: the norm's input; undefined without residual
  at::Tensor mean;  // undefined for kRms
  at::Tensor rstd;
};

struct NormSaved {
  const at::Tensor& norm_input;  // NormResult::sum, or x without residual
  const std::optional<at::Tensor>& weight;
  const std::optional<at::Tensor>& mean;  // absent for kRms
  const at::Tensor& rstd;
};

struct NormWanted {
  bool input;
  bool params;
  bool bias;  // with `params`
};

struct NormGradients {
  at::Tensor input;   // of x and of residual, which are equal; undefined unless wanted
  at::Tensor params;  // [1, d]: of weight; [2, d]: of weight and bias; in the dtype of weight
};

namespace cpu {

NormResult norm_forward(const NormArguments& arguments, Norm norm);

// `grad_sum` is the gradient of NormResult::sum; it is added to the input's gradient.
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
